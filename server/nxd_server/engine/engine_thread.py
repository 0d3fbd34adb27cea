"""The thread that owns a model: its life, failure and recovery. What a step is, a :class:`Batcher` says.

One thread runs every step, so nothing else needs the model's lock; callers only put requests into queues under the
engine's lock. When the ranks fail, every request fails with a typed error, and the ranks are started again as often
as ``restarts`` allows; beyond that the state is ``failed`` for good, and whoever serves is told (``wait_failed``). A
graph that *raised* (RankFailedError) after others had worked is its input's fault and does not use up a restart.
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
"""How long an idle thread sleeps at most before it looks after the ranks."""


class Batcher(Protocol):
    """Puts requests into steps. Everything but :meth:`has_news` is called by the engine's thread alone."""

    def work(self) -> bool:
        """Finish at most one step. False when there was nothing to do."""
        ...

    def has_news(self) -> bool:
        """Whether callers left something to do; called under the lock."""
        ...

    def wait_seconds(self) -> float:
        """How long an idle thread may sleep: until the next deadline, at most."""
        ...

    def graph_names(self) -> list[str]:
        """The graphs that may run."""
        ...

    def padding_inputs(self, name: str) -> Tensors | None:
        """Inputs that run a graph on behalf of nobody; None when that is not possible."""
        ...

    def warmed(self) -> None:
        """Undo what warm-up did to the states, where it did anything."""
        ...

    def finish_steps(self) -> None:
        """Wait for what the ranks have been given."""
        ...

    def ranks_lost(self, error: BaseException) -> None:
        """End those requests that are lost with the ranks, which are about to be started again."""
        ...

    def fail_all(self, error: Exception) -> None:
        """End every request with ``error``."""
        ...


class EngineThread:
    """Thread, state, health and recovery around one model."""

    def __init__(
        self,
        name: str,
        parts: EngineParts,
        batcher: Batcher,
        idle_probe: float | None,
        on_state: Callable[[str], None] | None,
    ):
        """``idle_probe``: seconds without a step after which a step of padding alone shows that the ranks still answer
        (None: never); ``on_state(state)`` is called at every change."""
        self.model = parts.model
        self.restarts = parts.restarts
        self.verdict = ""
        """Why the engine has failed for good, with the way out where there is one."""
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

    # --- life -----------------------------------------------------------------------------------------

    def start(self, *, on_progress: Progress | None = None, wait: bool = True) -> None:
        """Run graphs, measure them, and take requests. ``on_progress(done, total, bucket)`` follows the warm-up.

        With ``wait``, returns when ready, and raises EngineUnavailableError when the warm-up failed.
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
        """Take no new requests and wait for the others. True when all ended by themselves within ``timeout`` seconds;
        those that did not are failed with EngineUnavailableError when the engine is closed."""
        with self._lock:
            self._queue.draining = True
            self._gate.abandon("draining")
            self._lock.notify_all()
            done = self._lock.wait_for(
                lambda: (self._queue.untold == 0 and not self._gate.changing) or self._state in ("failed", "closed"),
                timeout,
            )
        return done and self._state != "failed"

    def close(self, timeout: float = 60.0) -> None:
        """End the thread after the step that it waits for; what still runs fails. The model stays its owner's."""
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
        """The thread's number in the system."""
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
        """EngineUnavailableError, counted, unless requests are taken; called under the lock.

        ``continuing``: a part of a request that has run in part already, which a drain lets finish.
        """
        state = self._state if continuing else self.state  # a drain lets what runs finish
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
                    if not self._batcher.work():
                        self._idle()
                except FATAL as error:
                    if not self._recover(error):
                        return
        except BaseException as error:
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
        """Make the change that is wanted, if nothing is left that it waits for. False when the engine is over."""
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

    def _idle(self) -> None:
        """Sleep until there is work; now and then make sure that the ranks are alive and answer."""
        with self._lock:
            if self._closing:
                return
            if not (self._batcher.has_news() or self._gate.due):
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
        """End every request, and start the ranks again if that is still allowed. False when it is over.

        ``begun``: False when no request has begun, so that none has lost anything: they go on waiting.
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
