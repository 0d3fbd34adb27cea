"""The thread that owns a model: its life, admission, failure and recovery. What a step is, a subclass says; how one
runs and is measured stands in ``runner``.

One thread runs every step, so nothing else needs the model's lock; callers only put requests into queues under
``_wake``'s lock. When the ranks fail, every request fails with a typed error, and the ranks are started again as often
as ``restarts`` allows; beyond that the state is ``failed`` for good, and whoever serves is told (``wait_failed``). A
graph that *raised* (RankFailedError) after others had worked is its input's fault and does not use up a restart.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from nxd_infer.errors import CollectiveError, ModelClosedError, RankError, RankFailedError
from nxd_server.engine.core.step_costs import StepCosts
from nxd_server.engine.core.step_runner import StepRunner
from nxd_server.engine.events import EngineHealth, EngineStats
from nxd_server.engine.queue_limit import Admission
from nxd_server.engine.rank_restarts import Restarts
from nxd_server.engine.warmup import Progress, warm_up, when_idle
from nxd_server.engine.weight_swap import WeightGate
from nxd_server.errors import (
    EngineUnavailableError,
    WeightsBusyError,
    forget_frames,
    log_failure,
    ranks_failed,
    summary,
    weights_busy,
)
from nxd_server.threads import keep_off

log = logging.getLogger("nxd_server.engine")

FATAL = (RankError, CollectiveError, ModelClosedError, ConnectionError)
"""Errors after which the ranks, and every state in them, are lost."""
IDLE_SECONDS = 1.0
"""How long an idle thread sleeps at most before it looks after the ranks."""


class ModelWorker(Admission, ABC):
    """Thread, state, health and recovery around one model."""

    def __init__(
        self,
        model: Any,
        *,
        max_queued_requests: int = 256,
        capacity: int = 0,
        restart_limit: int = 1,
        restart_window: float = 600.0,
        idle_probe: float | None = 5.0,
        on_state: Callable[[str], None] | None = None,
    ):
        """``capacity``: requests that fit without queueing; ``idle_probe``: seconds without a step after which a step
        of padding alone shows that the ranks still answer (None: never)."""
        super().__init__(max_queued_requests, capacity)
        self.model = model
        self.steps = StepRunner(model)
        self.costs = StepCosts(())
        self.restarts = Restarts(restart_limit, restart_window)
        self._idle_probe = idle_probe
        self._on_state = on_state
        self.gate = WeightGate(self._wake)
        self._state = "starting"
        self._draining = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.verdict = ""
        """Why the engine has failed for good, with the way out where there is one."""
        self._last_alive_check = 0.0
        self._updating = threading.Lock()

    # --- what a subclass provides ---------------------------------------------------------------------

    @abstractmethod
    def _work(self) -> bool:
        """Finish at most one step. False when there was nothing to do."""

    @abstractmethod
    def _padding_inputs(self, bucket: str) -> Mapping[str, Any] | None:
        """Inputs that run ``bucket`` on behalf of nobody; None when that is not possible."""

    @abstractmethod
    def _fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""

    @abstractmethod
    def _wait_seconds(self) -> float:
        """How long an idle thread may sleep: until the next deadline, at most."""

    def _warmed(self) -> None:
        """Undo what warm-up did to the states, where it did anything."""
        return

    def _bucket_names(self) -> list[str]:
        return [bucket.name for bucket in self.model.manifest.buckets]

    # --- life -----------------------------------------------------------------------------------------

    def start(self, *, on_progress: Progress | None = None, wait: bool = True) -> None:
        """Run graphs, measure them, and take requests. ``on_progress(done, total, bucket)`` follows the warm-up.

        With ``wait``, returns when ready, and raises EngineUnavailableError when the warm-up failed.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(on_progress,), name=f"nxd-{type(self).__name__}", daemon=True
            )
            self._thread.start()
        if wait:
            with self._wake:
                self._wake.wait_for(lambda: self._state != "starting")
            if self._state in ("failed", "closed"):
                error = self._error
                reason = summary(error) if error is not None else self._state
                raise EngineUnavailableError(f"the engine did not start: {reason}", self._state) from error

    def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests and wait for the others. True when all ended by themselves within ``timeout`` seconds;
        those that did not are failed with EngineUnavailableError when the engine is closed."""
        with self._wake:
            self._draining = True
            self.gate.abandon("draining")
            self._wake.notify_all()
            done = self._wake.wait_for(
                lambda: (self._untold == 0 and not self.gate.changing) or self._state in ("failed", "closed"), timeout
            )
        return done and self._state not in ("failed",)

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after the step that it waits for; what still runs fails. The model stays its owner's."""
        with self._wake:
            self._closing = True
            self.gate.abandon("closed")
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        elif self._thread is None:
            self._set_state("closed")

    def __enter__(self):
        if self._thread is None:
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_failed(self, timeout: float | None = None) -> bool:
        """Block until the engine has failed for good (True), was closed, or ``timeout`` seconds passed (False)."""
        with self._wake:
            self._wake.wait_for(lambda: self._state in ("failed", "closed"), timeout)
        return self._state == "failed"

    def update_weights(self, weights: Any, *, tag: str | None = None, timeout: float = 60.0) -> int:
        """Swap the model's weights between requests; the new version (the artifact's own are version 0).

        They are checked and cut for every rank while requests go on. Then what has begun is finished on the old
        weights, what waits or comes begins on the new ones, and no request is refused.

        Args:
            weights, tag: as ``TensorParallelModel.update_weights`` takes them, all of them.
            timeout: seconds that requests which have begun may take to finish.

        Raises what ``TensorParallelModel.update_weights`` does, WeightsBusyError, or EngineUnavailableError; the old
        weights stay. After RankFailedError the ranks are started again with them.
        """
        if self.state != "ready":
            raise EngineUnavailableError(f"the engine takes no weights: it is {self.state}", self.state)
        if not self._updating.acquire(blocking=False):
            raise weights_busy()
        try:
            return self._swap(self.model.cut_weights(weights, tag=tag), timeout)
        finally:
            self._updating.release()

    def _load_adapter(self, slot: int, folder: str | os.PathLike[str] | None, timeout: float) -> None:
        """As ``TensorParallelModel.load_adapter``, between two steps; a change before it, and the step that runs, may
        take ``timeout`` seconds each. Raises WeightsBusyError after that, or EngineUnavailableError."""
        if self._thread is None or self._thread is threading.current_thread():  # no step runs
            self.model.load_adapter(slot, folder)
            return
        if not self._updating.acquire(timeout=min(timeout, threading.TIMEOUT_MAX)):
            raise WeightsBusyError(f"another change of the weights was not over after {timeout:g} s; try again")
        try:
            self._swap(self.model.cut_adapter(slot, folder), timeout, quiet=False)
        finally:
            self._updating.release()

    def _swap(self, new: Any, timeout: float, *, quiet: bool = True) -> int:
        """Hand weights that were cut to the engine's thread; the version afterwards. They are closed unless swapped."""

        def swap() -> None:
            try:
                self.model.update_weights(new)
            except Exception:
                new.close()
                raise

        return self.gate.change(swap, timeout, withdrawn=new.close, quiet=quiet)

    # --- state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """starting, ready, draining, recovering, failed or closed."""
        return "draining" if self._draining and self._state == "ready" else self._state

    def health(self) -> EngineHealth:
        """Whether a request sent now would be served."""
        state, steps = self.state, self.steps
        reason = "" if state == "ready" else f"the engine is {state}"
        if state in ("ready", "draining"):
            reason = steps.overdue(self.costs) or reason
        return EngineHealth(
            state=state,
            ready=not reason,
            reason=reason,
            last_step_age=steps.age,
            step_running=steps.running_for,
            error=summary(self._error) if self._error else "",
            ranks=steps.ranks(),
            recovering_for=self.restarts.seconds,
            stage=self.restarts.stage,
        )

    def stats(self) -> EngineStats:
        """Counters and gauges now."""
        return EngineStats(
            state=self.state,
            waiting=self._inside,
            submitted=self._submitted,
            finished=dict(self._finished),
            rejected=dict(self._rejected),
            restarts=self.restarts.count,
            bucket_steps=dict(self.steps.bucket_steps),
            bucket_seconds=dict(self.steps.bucket_seconds),
            useful_tokens=dict(self.steps.useful_tokens),
            padding_tokens=dict(self.steps.padding_tokens),
            step_seconds=self.costs.as_dict(),
        )

    def _set_state(self, state: str) -> None:
        with self._wake:
            self._state = state
            self._wake.notify_all()
        if self._on_state is not None:
            try:
                self._on_state(state)
            except Exception:
                log.exception("on_state(%r) raised", state)

    # --- admission (callers' threads, under the lock) ---------------------------------------------------

    def _check_open(self, continuing: bool = False) -> None:
        state = self._state if continuing else self.state  # a drain lets what runs finish
        if state == "ready" and not self._closing:
            return
        self._rejected["unavailable"] += 1
        retry = {"starting": 5.0, "recovering": 5.0}.get(state)
        raise EngineUnavailableError(f"the engine takes no requests: it is {state}", state, retry)

    # --- the thread -----------------------------------------------------------------------------------

    def _run(self, on_progress: Progress | None) -> None:
        try:
            self._warm_up(on_progress)
            self._set_state("ready")
            while not self._closing:
                try:
                    if not self._change_weights():
                        return
                    if not self._work():
                        self._idle()
                except FATAL as error:
                    if not self._recover(error):
                        return
        except BaseException as error:
            log_failure(log, "the engine failed", error)
            self._give_up(error, f"the engine failed: {summary(error) or type(error).__name__}")
        else:
            self._forget_steps()
            self.gate.abandon("closed")
            self._fail_all(EngineUnavailableError("the engine was closed before this request was finished", "closed"))
            self._set_state("closed")

    def _warm_up(self, on_progress: Progress | None) -> None:
        names, going = self._bucket_names(), lambda: not self._closing
        warm_up(self.steps, self.costs, names, self._padding_inputs, on_progress, going)
        self._warmed()
        keep_off(getattr(self.model, "lead_cores", ()))

    def _change_weights(self) -> bool:
        """Make the change that is wanted, if nothing is left that it waits for. False when the engine is over."""
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

    def _idle(self) -> None:
        """Sleep until there is work; now and then make sure that the ranks are alive and answer."""
        with self._wake:
            if self._closing:
                return
            if not (self._has_news() or self.gate.due):
                self._wake.wait(min(IDLE_SECONDS, self._wait_seconds()))
            if self._has_news() or self.gate.due or self._closing:
                return
        now = time.monotonic()
        if now - self._last_alive_check >= IDLE_SECONDS:
            self._last_alive_check = now
            self.steps.check_alive()
        if self._idle_probe is not None:
            when_idle(self.steps, self.costs, self._bucket_names(), self._padding_inputs, self._idle_probe)

    def _has_news(self) -> bool:
        """Whether callers left something to do; called under the lock."""
        return False

    # --- failure --------------------------------------------------------------------------------------

    def _recover(self, error: BaseException, *, begun: bool = True) -> bool:
        """End every request, and start the ranks again if that is still allowed. False when it is over.

        ``begun``: False when no request has begun, so that none has lost anything: they go on waiting.
        """
        log_failure(log, "the ranks failed", error)
        forget_frames(error)
        self._forget_steps()
        self._error = error
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
            log_failure(log, "the ranks could not be started again", second)
            self._give_up(second, f"the ranks failed ({summary(error)}) and could not be started again: {reason}")
            return False
        seconds = self.restarts.end()
        self._set_state("ready")
        log.info("the ranks are ready again after %.1f s", seconds)
        return True

    def _start_again(self) -> None:
        self._forget_steps()
        self.steps.worked = False
        self.model.restart()
        self.restarts.at("a first step runs")
        self._warm_up(None)

    def _ending(self) -> str:
        return "the engine ends" if self._closing or self._draining else ""

    def _ranks_lost(self, error: BaseException) -> None:
        """What becomes of the requests when the ranks are about to be started again."""
        self._fail_all(ranks_failed(error))

    def _finish_steps(self) -> None:
        """Wait for what the ranks have been given. A subclass that gives them steps ahead does."""
        return

    def _forget_steps(self) -> None:
        """Whatever the ranks were given is gone with them."""
        self.steps.forget()

    def _give_up(self, error: BaseException, verdict: str) -> None:
        self._error, self.verdict = error, verdict
        self.restarts.end()
        self._forget_steps()
        self._set_state("failed")
        self.gate.abandon("failed")
        self._fail_all(ranks_failed(error))
