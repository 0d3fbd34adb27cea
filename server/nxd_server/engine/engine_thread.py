"""The thread that owns a model: lifecycle, failure and recovery. A :class:`Batcher` defines what a step is.

One thread runs every step, so nothing else needs the model's lock; callers only queue requests under the
engine's lock. When the ranks fail, every request fails with a typed error, and the ranks are restarted as often
as ``restarts`` allows; beyond that the state is ``failed`` for good, which ``wait_failed`` reports. A graph that
*raised* (RankFailedError) after others had worked is its input's fault and does not count as a restart. Ranks that were
restarted have worked once they have repeated a step that worked before.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nxd_infer.errors import RankFailedError
from nxd_server.engine.core.model import Tensors
from nxd_server.engine.core.step_runner import FATAL
from nxd_server.engine.engine_parts import EngineParts
from nxd_server.engine.warmup import Progress, warm_up, when_idle
from nxd_server.errors import EngineUnavailableError, forget_frames, log_failure, ranks_failed, summary
from nxd_server.threads import keep_off

log = logging.getLogger("nxd_server.engine")

IDLE_SECONDS = 1.0
"""An idle thread checks the ranks at least this often."""


class Batcher(Protocol):
    """Turns requests into steps. All methods except :meth:`has_news` are called only by the engine's thread."""

    def work(self) -> bool:
        """Finish at most one step. Return False if there was nothing to do."""
        ...

    def has_news(self) -> bool:
        """Whether callers left something to do; called with the lock held."""
        ...

    def wait_seconds(self) -> float:
        """Return how long an idle thread may sleep: at most until the next deadline."""
        ...

    def graph_names(self) -> list[str]:
        """Return the graphs that may run."""
        ...

    def padding_inputs(self, name: str) -> Tensors | None:
        """Return padding inputs that run a graph without a request; None if that is not possible."""
        ...

    def prove(self) -> None:
        """After a restart: repeat a step for requests that worked before, if there is one that can be repeated, so that
        the next one that fails is its inputs' fault, even if no other comes in between."""
        ...

    def warmed(self) -> None:
        """Undo the effects of warm-up on the states, if any."""
        ...

    def finish_steps(self) -> None:
        """Wait for the steps that were given to the ranks."""
        ...

    def ranks_lost(self, error: BaseException) -> None:
        """End the requests that are lost with the ranks, which are about to be restarted."""
        ...

    def fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""
        ...


class EngineThread:
    """The thread, state, health and recovery of one model."""

    def __init__(
        self,
        name: str,
        parts: EngineParts,
        batcher: Batcher,
        idle_probe: float | None,
        on_state: Callable[[str], None] | None,
    ):
        """``idle_probe``: seconds without a step after which a step of padding checks that the ranks still answer
        (None: never); ``on_state(state)`` is called at every change."""
        self.model = parts.model
        self.restarts = parts.restarts
        self.verdict = ""
        """Why the engine has failed for good, with the fix if there is one."""
        self.error: BaseException | None = None
        """The last failure of the ranks."""
        self._name = name
        self._batcher = batcher
        self._lock, self._queue, self._gate = parts.lock, parts.queue, parts.gate
        self._steps, self._costs = parts.steps, parts.costs
        self._idle_probe = idle_probe
        self._on_state = on_state
        self._state = "starting"
        self._closing = False
        self._thread: threading.Thread | None = None
        self._last_alive_check = 0.0

    # --- lifecycle -----------------------------------------------------------------------------------------

    def start(self, *, on_progress: Progress | None = None, wait: bool = True) -> None:
        """Run and measure graphs, then accept requests. ``on_progress(done, total, bucket)`` follows the warm-up.

        With ``wait``, returns when ready, and raises EngineUnavailableError if the warm-up failed.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(on_progress,), name=f"nxd-{self._name}", daemon=True
            )
            self._thread.start()
        if wait:
            with self._lock:
                self._lock.wait_for(lambda: self._state != "starting")
            if self._state in ("failed", "closed"):
                error = self.error
                reason = summary(error) if error is not None else self._state
                raise EngineUnavailableError(f"the engine did not start: {reason}", self._state) from error

    def drain(self, timeout: float | None = None) -> bool:
        """Accept no new requests and wait for the others. True if all ended by themselves within ``timeout`` seconds;
        the rest fail with EngineUnavailableError when the engine is closed."""
        with self._lock:
            self._queue.draining = True
            self._gate.abandon("draining")
            self._lock.notify_all()
            done = self._lock.wait_for(
                lambda: (
                    (self._queue.unreported == 0 and not self._gate.changing) or self._state in ("failed", "closed")
                ),
                timeout,
            )
        return done and self._state != "failed"

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after its current step; unfinished requests fail. The model still belongs to its owner."""
        with self._lock:
            self._closing = True
            self._gate.abandon("closed")
            self._lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        elif self._thread is None:
            self._set_state("closed")

    def wait_failed(self, timeout: float | None = None) -> bool:
        """Block until the engine has failed for good (True), was closed, or ``timeout`` seconds passed (False)."""
        with self._lock:
            self._lock.wait_for(lambda: self._state in ("failed", "closed"), timeout)
        return self._state == "failed"

    # --- state ----------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """starting, ready, draining, recovering, failed or closed."""
        return "draining" if self._queue.draining and self._state == "ready" else self._state

    @property
    def started(self) -> bool:
        """Whether steps may run: not before :meth:`start`."""
        return self._thread is not None

    @property
    def native_id(self) -> int | None:
        """The thread's id in the operating system."""
        return None if self._thread is None else self._thread.native_id

    @property
    def inside(self) -> bool:
        """Whether the caller is the engine's thread."""
        return self._thread is threading.current_thread()

    def _set_state(self, state: str) -> None:
        with self._lock:
            self._state = state
            self._lock.notify_all()
        if self._on_state is not None:
            try:
                self._on_state(state)
            except Exception:
                log.exception("on_state(%r) raised", state)

    def check_open(self, continuing: bool = False) -> None:
        """Raise and count EngineUnavailableError unless requests are accepted; call with the lock held.

        ``continuing``: part of a request that has already run in part, which a drain lets finish.
        """
        state = self._state if continuing else self.state  # a drain lets running requests finish
        if state == "ready" and not self._closing:
            return
        self._queue.rejected["unavailable"] += 1
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
                    openings = self._gate.openings
                    if not self._batcher.work():
                        self._idle(openings)
                except FATAL as error:
                    if not self._recover(error):
                        return
        except BaseException as error:
            if not self._closing:  # else that is why
                log_failure(log, "the engine failed", error)
            self._give_up(error, f"the engine failed: {summary(error) or type(error).__name__}")
        else:
            self._steps.forget()
            self._gate.abandon("closed")
            self._batcher.fail_all(
                EngineUnavailableError("the engine was closed before this request was finished", "closed")
            )
            self._set_state("closed")

    def _warm_up(self, on_progress: Progress | None) -> None:
        names, going = self._batcher.graph_names(), lambda: not self._closing
        warm_up(self._steps, self._costs, names, self._batcher.padding_inputs, on_progress, going)
        self._batcher.warmed()
        keep_off(self.model.lead_cores)

    def _change_weights(self) -> bool:
        """Make the wanted change, if nothing is left to wait for. Return False if the engine is over."""
        if not self._gate.due:
            return True
        self._batcher.finish_steps()
        change = self._gate.take_change()
        if change is None:
            return True
        try:
            change.action()
        except FATAL as error:
            self._gate.finish(error)
            return self._recover(error, begun=not change.quiet)
        except BaseException as error:  # nothing has changed
            self._gate.finish(error)
            if not isinstance(error, Exception):
                raise
            return True
        self._gate.finish()
        return True

    def _idle(self, openings: int) -> None:
        """Sleep until there is work; periodically check that the ranks are alive and answer.

        ``openings``: the gate's before the look for work; requests that it held back may have been let through since.
        """
        with self._lock:
            if self._closing:
                return
            if not (self._batcher.has_news() or self._gate.due or self._gate.openings != openings):
                self._lock.wait(min(IDLE_SECONDS, self._batcher.wait_seconds()))
            if self._batcher.has_news() or self._gate.due or self._closing:
                return
        now = time.monotonic()
        if now - self._last_alive_check >= IDLE_SECONDS:
            self._last_alive_check = now
            self._steps.check_alive()
        if self._idle_probe is not None:
            when_idle(
                self._steps, self._costs, self._batcher.graph_names(), self._batcher.padding_inputs, self._idle_probe
            )

    # --- failure --------------------------------------------------------------------------------------

    def _recover(self, error: BaseException, *, begun: bool = True) -> bool:
        """End every request, and restart the ranks if that is still allowed. Return False if the engine is over.

        ``begun``: False if no request has begun, so that none has lost anything: they keep waiting.
        """
        log_failure(log, "the ranks failed", error)
        forget_frames(error)
        self._steps.forget()
        self.error = error
        excused = isinstance(error, RankFailedError) and self._steps.worked
        if refusal := self._ending() or self.restarts.refusal(excused):
            self._give_up(error, f"the ranks failed ({summary(error)}) and are not started again: {refusal}")
            return False
        self._set_state("recovering")
        if begun:
            self._batcher.ranks_lost(error)
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
        self._steps.forget()
        self._steps.worked = False
        self.model.restart()
        self.restarts.at("a first step runs")
        self._batcher.prove()
        self._warm_up(None)

    def _ending(self) -> str:
        return "the engine ends" if self._closing or self._queue.draining else ""

    def _give_up(self, error: BaseException, verdict: str) -> None:
        self.error, self.verdict = error, verdict
        self.restarts.end()
        self._steps.forget()
        self._set_state("failed")
        self._gate.abandon("failed")
        self._batcher.fail_all(ranks_failed(error))
