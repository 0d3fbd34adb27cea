"""The core of an engine: the thread that owns its model, and the owner's calls (start, close, change weights, health).
A subclass defines how requests are submitted, and what a step is.

One thread runs every step, so nothing else needs the model's lock; callers only queue requests under the
engine's lock. When the ranks fail, every request fails with a typed error, and the ranks are restarted as often
as ``restarts`` allows; beyond that the state is ``failed`` for good, which ``wait_failed`` reports. A graph that
*raised* (RankFailedError) after others had worked is its input's fault and does not count as a restart. Ranks that were
restarted have worked once they have repeated a step that worked before.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from nxd_infer.errors import RankFailedError
from nxd_infer.runtime.rank_model import RankModel
from nxd_infer.runtime.ranks import RankHealth
from nxd_server.engine.admission import QueueLimit, WeightGate, WholeRequest
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.engine.step_runner import FATAL, Progress, StepCosts, StepRunner, Tensors
from nxd_server.errors import (
    EngineFailedError,
    EngineUnavailableError,
    WeightsBusyError,
    forget_frames,
    log_failure,
    summary,
)
from nxd_server.threads import keep_off

if TYPE_CHECKING:
    from nxd_infer.runtime.updates.weights import NewWeights

log = logging.getLogger("nxd_server.engine")

IDLE_SECONDS = 1.0
"""An idle thread checks the ranks at least this often."""

OF_STEPS = ("bucket_steps", "bucket_seconds", "useful_tokens", "padding_tokens")
MEANS = ("kv_usage", "step_seconds")
"""Statistics that are no counts."""

EngineT = TypeVar("EngineT", bound="EngineCore")


@dataclass
class EngineStats:
    """A consistent snapshot of counters and gauges. Counters never decrease."""

    state: str
    slots: int = 0
    slots_free: int = 0
    running: int = 0
    """Choices that hold a slot (prefilling or decoding), or one-shot requests in the running step."""
    waiting: int = 0
    waiting_tokens: int = 0
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Choices by outcome: stop, length (one-shot requests: done), cancelled, error, deadline."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Requests rejected at submission, by reason: queue_full, unavailable, invalid."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Those that an earlier request had left in the cache."""
    generated_tokens: int = 0
    draft_tokens: int = 0
    """Tokens that were guessed and verified ..."""
    accepted_tokens: int = 0
    """... and those accepted, which are included in ``generated_tokens``."""
    restarts: int = 0
    bucket_steps: dict[str, int] = field(default_factory=dict)
    """Executions by bucket name, without warm-up and idle probes."""
    bucket_seconds: dict[str, float] = field(default_factory=dict)
    useful_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens (one-shot: rows) of requests, by bucket ..."""
    padding_tokens: dict[str, int] = field(default_factory=dict)
    """... and of padding."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """The scheduler's current estimate of one execution, by bucket."""
    kv_usage: float = 0.0
    """Fraction of the cache's positions (slots x maximum length) that hold live tokens."""

    def together(self, others: Sequence[EngineStats]) -> EngineStats:
        """Return the sums over these and ``others``, of engines of the same model; means of what is no count."""
        all_stats = [self, *others]

        def joined(name: str) -> Any:
            values = [getattr(one, name) for one in all_stats]
            if isinstance(values[0], dict):
                found = {key: sum(value.get(key, 0) for value in values) for value in values for key in value}
                return {key: total / len(values) for key, total in found.items()} if name in MEANS else found
            if isinstance(values[0], str):
                return values[0]
            return sum(values) / len(values) if name in MEANS else sum(values)

        names = [one.name for one in fields(self)]
        return self if not others else EngineStats(**{name: joined(name) for name in names})


@dataclass(frozen=True)
class EngineHealth:
    """Whether the engine can answer, and if not, why."""

    state: str
    """starting, ready, draining, recovering, failed or closed."""
    ready: bool
    """True when a request sent now would be served: state ready and no step overdue."""
    reason: str = ""
    last_step_age: float | None = None
    """Seconds since a step last completed."""
    step_running: float | None = None
    """Seconds since the step in flight began; None between steps."""
    error: str = ""
    """The last failure of the ranks, if any."""
    ranks: list[RankHealth] = field(default_factory=list)
    recovering_for: float | None = None
    """Seconds since the restart of the ranks began; None if there is none."""
    stage: str = ""
    """What the restart is waiting for."""
    draft: dict[str, Any] | None = None
    """Whether the draft model guesses (``ready``), and its ``restarts``; None without one."""


class EngineCore:
    """The thread, state, health and recovery of one model."""

    def __init__(
        self,
        model: RankModel,
        costs: StepCosts,
        capacity: int,
        *,
        max_queued_requests: int | None = None,
        max_queued_tokens: int | None = None,
        max_queue_wait: float | None = None,
        restart_limit: int = 3,
        restart_window: float = 600.0,
        idle_probe: float | None = 5.0,
        on_state: Callable[[str], None] | None = None,
    ):
        """``capacity``: requests that fit without queueing. ``max_queued_requests``, ``max_queued_tokens`` and
        ``max_queue_wait`` limit how many requests wait, with how many tokens in all (of one-shot models: numbers of
        their largest inputs), and for how many seconds. ``idle_probe``: seconds without a step after which a step of
        padding checks that the ranks still answer (None: never); ``on_state(state)`` is called at every change."""
        self.model = model
        self.lock = threading.Condition()
        """Of what callers and the thread share."""
        self.queue = QueueLimit(self.lock, capacity, max_queued_requests, max_queued_tokens, max_queue_wait)
        self.gate = WeightGate(self.lock)
        self.steps = StepRunner(model, costs, self._padding_inputs)
        self.restarts = RankRestarts(restart_limit, restart_window)
        self.verdict = ""
        """Why the engine has failed for good, with the fix if there is one."""
        self.error: BaseException | None = None
        """The last failure of the ranks."""
        self.thread: threading.Thread | None = None
        """None before :meth:`start`: no step runs."""
        self._idle_probe = idle_probe
        self._on_state = on_state
        self._state = "starting"
        self._closing = False
        self._last_alive_check = 0.0
        self._updating = threading.Lock()

    # --- what a subclass says of its steps; the engine's thread alone calls these -----------------------------

    def _work(self) -> bool:
        """Finish at most one step. Return False if there was nothing to do."""
        raise NotImplementedError

    def _has_news(self) -> bool:
        """Whether callers left something to do; called with the lock held."""
        raise NotImplementedError

    def _wait_seconds(self) -> float:
        """Return how long an idle thread may sleep: at most until the next deadline."""
        raise NotImplementedError

    def _padding_inputs(self, name: str) -> Tensors:
        """Return padding inputs that run a graph without a request."""
        raise NotImplementedError

    def _prove(self) -> None:
        """After a restart: repeat a step for requests that worked before, if there is one that can be repeated, so that
        the next one that fails is its inputs' fault, even if no other comes in between."""

    def _warmed(self) -> None:
        """Undo the effects of warm-up on the states, if any."""

    def _finish_steps(self) -> None:
        """Wait for the steps that were given to the ranks."""

    def _ranks_lost(self, error: BaseException) -> None:
        """End the requests that are lost with the ranks, which are about to be restarted."""
        self._fail_all(EngineFailedError(error))

    def _fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""
        raise NotImplementedError

    # --- lifecycle -----------------------------------------------------------------------------------------

    def start(self, *, on_progress: Progress | None = None) -> None:
        """Run and measure graphs, then accept requests. ``on_progress(done, total, bucket)`` follows the warm-up.

        Returns when ready. Raises EngineUnavailableError if the warm-up failed.
        """
        if self.thread is None:
            name = f"nxd-{type(self).__name__}"
            self.thread = threading.Thread(target=self._run, args=(on_progress,), name=name, daemon=True)
            self.thread.start()
        with self.lock:
            self.lock.wait_for(lambda: self._state != "starting")
        if self._state in ("failed", "closed"):
            error = self.error
            reason = summary(error) if error is not None else self._state
            raise EngineUnavailableError(f"the engine did not start: {reason}", self._state) from error

    def drain(self, timeout: float | None = None) -> bool:
        """Accept no new requests and wait for the others. True if all ended by themselves within ``timeout`` seconds;
        the rest fail with EngineUnavailableError when the engine is closed."""
        with self.lock:
            self.queue.draining = True
            self.gate.abandon("draining")
            self.lock.notify_all()
            done = self.lock.wait_for(
                lambda: (self.queue.unreported == 0 and not self.gate.changing) or self._state in ("failed", "closed"),
                timeout,
            )
        return done and self._state != "failed"

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after its current step; unfinished requests fail. The model still belongs to its owner."""
        with self.lock:
            self._closing = True
            self.gate.abandon("closed")
            self.lock.notify_all()
        if self.thread is None:
            self._set_state("closed")
        elif self.thread is not threading.current_thread():
            self.thread.join(timeout)

    def __enter__(self: EngineT) -> EngineT:
        if self.thread is None:
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_failed(self, timeout: float | None = None) -> bool:
        """Block until the engine has failed for good (True), was closed, or ``timeout`` seconds passed (False)."""
        with self.lock:
            self.lock.wait_for(lambda: self._state in ("failed", "closed"), timeout)
        return self._state == "failed"

    # --- state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """starting, ready, draining, recovering, failed or closed."""
        return "draining" if self.queue.draining and self._state == "ready" else self._state

    def _set_state(self, state: str) -> None:
        with self.lock:
            self._state = state
            self.lock.notify_all()
        if self._on_state is not None:
            try:
                self._on_state(state)
            except Exception:
                log.exception("on_state(%r) raised", state)

    def check_room(
        self,
        requests: int,
        tokens: int = 0,
        *,
        whole: WholeRequest | None = None,
        timeout: float | None = None,
        continuing: bool = False,
    ) -> None:
        """Raise (and count) EngineUnavailableError unless requests are accepted; QueueFullError or RateLimitError
        unless ``requests`` more of so many tokens together fit now.

        For a caller that submits several: those that fit would take the room of other requests until their
        cancellation. ``whole``, ``timeout`` and ``continuing``: as for :meth:`OneShotEngine.submit`.
        """
        with self.lock:
            state = self._state if continuing else self.state
            if state != "ready" or self._closing:
                self.queue.rejected["unavailable"] += 1
                retry = {"starting": 5.0, "recovering": 5.0}.get(state)
                raise EngineUnavailableError(f"the engine takes no requests: it is {state}", state, retry)
            if not (continuing and self.gate.closed):  # the queued requests wait for this one to end
                self.queue.check(whole or WholeRequest(), requests, tokens, timeout)

    def health(self) -> EngineHealth:
        """Whether a request sent now would be served."""
        state = self.state
        reason = "" if state == "ready" else f"the engine is {state}"
        if state in ("ready", "draining"):
            # Set before the ranks are ended, which takes as long as freeing their memory; they may seem well meanwhile.
            lost = self.model.failure
            reason = f"the ranks failed: {summary(lost)}" if lost else self.steps.overdue or reason
        return EngineHealth(
            state=state,
            ready=not reason,
            reason=reason,
            last_step_age=self.steps.age,
            step_running=self.steps.running_for,
            error=summary(self.error) if self.error else "",
            ranks=list(self.model.health()),
            recovering_for=self.restarts.seconds,
            stage=self.restarts.stage,
        )

    def stats(self) -> EngineStats:
        """Return the current counters and gauges."""
        queue, steps = self.queue, self.steps
        of_steps: dict[str, Any] = {name: dict(getattr(steps, name)) for name in OF_STEPS}
        stats = EngineStats(self.state, restarts=self.restarts.count, step_seconds=steps.costs.as_dict(), **of_steps)
        stats.waiting, stats.waiting_tokens, stats.submitted = queue.inside, queue.waiting_tokens, queue.submitted
        stats.finished, stats.rejected = dict(queue.finished), dict(queue.rejected)
        return stats

    # --- new weights: sharded in the caller's thread, swapped in by the engine's thread -----------------------

    def update_weights(
        self, weights: Any, *, tag: str | None = None, timeout: float = 60.0, version: int | None = None
    ) -> int:
        """Swap the model's weights between requests; return the new version (the artifact's weights are version 0).

        The weights are checked and sharded for every rank while requests continue. Then requests that have begun finish
        on the old weights, waiting and later ones begin on the new weights, and none is rejected.

        Args:
            weights, tag: as for ``TensorParallelModel.update_weights``; the complete weights.
            timeout: seconds that requests that have begun may take to finish.
            version: the new version, if it is not the next one.

        Raises what ``TensorParallelModel.update_weights`` does, WeightsBusyError, or EngineUnavailableError, and keeps
        the old weights. After a RankFailedError the ranks are restarted with them.
        """
        if (state := self.state) != "ready":
            raise EngineUnavailableError(f"the engine takes no weights: it is {state}", state)
        if not self._updating.acquire(blocking=False):
            raise WeightsBusyError
        try:
            return self._swap(self.model.cut_weights(weights, tag=tag), timeout, version=version)
        finally:
            self._updating.release()

    def load_adapter(self, slot: int, folder: str | os.PathLike[str] | None, timeout: float) -> None:
        """Like ``TensorParallelModel.load_adapter``, between two steps. An earlier change and the running step may take
        ``timeout`` seconds each, then it raises WeightsBusyError; EngineUnavailableError if the engine has ended."""
        if self.thread is None:
            self._put(self.model.cut_adapter(slot, folder))
            return
        if not self._updating.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise WeightsBusyError(f"another change of the weights was not over after {timeout:g} s; try again")
        try:
            self._swap(self.model.cut_adapter(slot, folder), timeout, quiet=False)
        finally:
            self._updating.release()

    def restart_ranks(self, timeout: float = 60.0) -> None:
        """Start the ranks anew between requests: those that have begun finish first, and the others wait for it.

        Raises WeightsBusyError if they did not finish within ``timeout`` seconds, or for another change;
        EngineUnavailableError; and what keeps the ranks from starting, which are then restarted as lost ones are.
        """
        if (state := self.state) != "ready":
            raise EngineUnavailableError(f"the ranks are not started anew: the engine is {state}", state)

        def restart() -> None:
            self._start_again()
            self.restarts.end()

        self.gate.change(restart, timeout, withdrawn=lambda: None, version=self.gate.version)
        log.info("the ranks were started anew")

    def _swap(self, new: NewWeights, timeout: float, *, quiet: bool = True, version: int | None = None) -> int:
        """Pass sharded weights to the engine's thread; return the version after it. Closes them unless swapped in."""
        return self.gate.change(lambda: self._put(new), timeout, withdrawn=new.close, quiet=quiet, version=version)

    def _put(self, new: NewWeights) -> None:
        try:
            self.model.update_weights(new)
        except Exception:
            new.close()
            raise

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self, on_progress: Progress | None) -> None:
        try:
            self._warm_up(on_progress)
            self._set_state("ready")
            while not self._closing:
                try:
                    if not self._change_weights():
                        return
                    openings = self.gate.openings
                    if not self._work():
                        self._idle(openings)
                except FATAL as error:
                    if not self._recover(error):
                        return
        except BaseException as error:
            if not self._closing:  # else that is why
                log_failure(log, "the engine failed", error)
            self._give_up(error, f"the engine failed: {summary(error) or type(error).__name__}")
        else:
            self.steps.forget()
            self.gate.abandon("closed")
            self._fail_all(EngineUnavailableError("the engine was closed before this request was finished", "closed"))
            self._set_state("closed")

    def _warm_up(self, on_progress: Progress | None) -> None:
        self.steps.warm_up(on_progress, lambda: not self._closing)
        self._warmed()
        keep_off(self.model.lead_cores)

    def _change_weights(self) -> bool:
        """Make the wanted change, if nothing is left to wait for. Return False if the engine is over."""
        if not self.gate.due:
            return True
        self._finish_steps()
        change = self.gate.take_change()
        if change is None:
            return True
        try:
            change.action()
        except FATAL as error:
            self.gate.finish(error)
            return self._recover(error, begun=not change.quiet)
        except BaseException as error:  # nothing has changed
            self.gate.finish(error)
            if not isinstance(error, Exception):
                raise
            return True
        self.gate.finish()
        return True

    def _idle(self, openings: int) -> None:
        """Sleep until there is work; periodically check that the ranks are alive and answer.

        ``openings``: the gate's before the look for work; requests that it held back may have been let through since.
        """
        with self.lock:
            if self._closing:
                return
            if not (self._has_news() or self.gate.due or self.gate.openings != openings):
                self.lock.wait(min(IDLE_SECONDS, self._wait_seconds()))
            if self._has_news() or self.gate.due or self._closing:
                return
        now = time.monotonic()
        if now - self._last_alive_check >= IDLE_SECONDS:
            self._last_alive_check = now
            self.steps.check_alive()
        if self._idle_probe is not None:
            self.steps.when_idle(self._idle_probe)

    # --- failure --------------------------------------------------------------------------------------

    def _recover(self, error: BaseException, *, begun: bool = True) -> bool:
        """End every request, and restart the ranks if that is still allowed. Return False if the engine is over.

        ``begun``: False if no request has begun, so that none has lost anything: they keep waiting.
        """
        log_failure(log, "the ranks failed", error)
        forget_frames(error)
        self.steps.forget()
        self.error = error
        excused = isinstance(error, RankFailedError) and self.steps.worked
        if refusal := self._ending() or self.restarts.refusal(excused):
            self._give_up(error, f"the ranks failed ({summary(error)}) and are not started again: {refusal}")
            return False
        self._set_state("recovering")
        if begun:
            self._ranks_lost(error)
        failed = self.restarts.run(self._start_again, excused, self._ending)
        if failed is not None:
            second, reason = failed
            if not self._closing:
                log_failure(log, "the ranks could not be started again", second)
            self._give_up(second, f"the ranks failed ({summary(error)}) and could not be started again: {reason}")
            return False
        seconds = self.restarts.end()
        self._set_state("ready")
        log.info("the ranks are ready again after %.1f s", seconds)
        return True

    def _start_again(self) -> None:
        self.steps.forget()
        self.steps.worked = False
        self.model.restart()
        self.restarts.at("a first step runs")
        self._prove()
        self._warm_up(None)

    def _ending(self) -> str:
        return "the engine ends" if self._closing or self.queue.draining else ""

    def _give_up(self, error: BaseException, verdict: str) -> None:
        self.error, self.verdict = error, verdict
        self.restarts.end()
        self.steps.forget()
        self._set_state("failed")
        self.gate.abandon("failed")
        self._fail_all(EngineFailedError(error))
