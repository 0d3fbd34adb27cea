"""What an engine's owner calls, whatever its steps are: start, close, change weights, health."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nxd_server.engine.engine_parts import EngineParts
from nxd_server.engine.engine_thread import Batcher, EngineThread
from nxd_server.engine.events import EngineHealth, EngineStats
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.engine.warmup import Progress
from nxd_server.engine.weight_updates import WeightUpdates
from nxd_server.errors import summary

EngineT = TypeVar("EngineT", bound="EngineControls")


class EngineControls:
    """The public face of ``parts`` and their thread; a subclass adds how requests are submitted."""

    def __init__(
        self,
        name: str,
        parts: EngineParts,
        batcher: Batcher,
        idle_probe: float | None,
        on_state: Callable[[str], None] | None,
    ):
        self.model = parts.model
        self.thread = EngineThread(name, parts, batcher, idle_probe, on_state)
        self.parts = parts
        self.updates = WeightUpdates(self.thread, parts.gate)

    def start(self, *, on_progress: Progress | None = None, wait: bool = True) -> None:
        """See :meth:`EngineThread.start`."""
        self.thread.start(on_progress=on_progress, wait=wait)

    def drain(self, timeout: float | None = None) -> bool:
        """See :meth:`EngineThread.drain`."""
        return self.thread.drain(timeout)

    def close(self, timeout: float = 60.0) -> None:
        """See :meth:`EngineThread.close`."""
        self.thread.close(timeout)

    def __enter__(self: EngineT) -> EngineT:
        if not self.thread.started:
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def wait_failed(self, timeout: float | None = None) -> bool:
        """See :meth:`EngineThread.wait_failed`."""
        return self.thread.wait_failed(timeout)

    def update_weights(self, weights: Any, *, tag: str | None = None, timeout: float = 60.0) -> int:
        """Swap the model's weights between requests; return the new version (the artifact's weights are version 0).

        The weights are checked and sharded for every rank while requests continue. Then requests that have begun finish
        on the old weights, waiting and later ones begin on the new weights, and none is rejected.

        Args:
            weights, tag: as for ``TensorParallelModel.update_weights``; the complete weights.
            timeout: seconds that requests that have begun may take to finish.

        Raises what ``TensorParallelModel.update_weights`` does, WeightsBusyError, or EngineUnavailableError, and keeps
        the old weights. After a RankFailedError the ranks are restarted with them.
        """
        return self.updates.update(weights, tag, timeout)

    def check_room(self, requests: int, continuing: bool = False) -> None:
        """Raise QueueFullError unless ``requests`` more fit now, or EngineUnavailableError.

        For who submits several: those that fit would take the room of other requests until their cancellation.
        ``continuing``: as for :meth:`OneShotEngine.submit`.
        """
        with self.parts.lock:
            self.thread.check_open(continuing)
            if not (continuing and self.parts.gate.wanted):  # the queued requests wait for this one to end
                self.parts.queue.check(requests)

    @property
    def capacity(self) -> int:
        """Requests that fit without queueing."""
        return self.parts.queue.capacity

    @property
    def restarts(self) -> RankRestarts:
        return self.parts.restarts

    @property
    def state(self) -> str:
        """starting, ready, draining, recovering, failed or closed."""
        return self.thread.state

    @property
    def verdict(self) -> str:
        """Why the engine has failed for good, with the fix if there is one."""
        return self.thread.verdict

    def health(self) -> EngineHealth:
        """Whether a request sent now would be served."""
        state, steps, restarts = self.state, self.parts.steps, self.parts.restarts
        reason = "" if state == "ready" else f"the engine is {state}"
        if state in ("ready", "draining"):
            # Set before the ranks are ended, which takes as long as freeing their memory; they may seem well meanwhile.
            lost = self.model.failure
            reason = f"the ranks failed: {summary(lost)}" if lost else steps.overdue(self.parts.costs) or reason
        error = self.thread.error
        return EngineHealth(
            state=state,
            ready=not reason,
            reason=reason,
            last_step_age=steps.age,
            step_running=steps.running_for,
            error=summary(error) if error else "",
            ranks=list(self.model.health()),
            recovering_for=restarts.seconds,
            stage=restarts.stage,
        )

    def stats(self) -> EngineStats:
        """Return the current counters and gauges."""
        queue, steps = self.parts.queue, self.parts.steps
        return EngineStats(
            state=self.state,
            waiting=queue.inside,
            submitted=queue.submitted,
            finished=dict(queue.finished),
            rejected=dict(queue.rejected),
            restarts=self.parts.restarts.count,
            bucket_steps=dict(steps.bucket_steps),
            bucket_seconds=dict(steps.bucket_seconds),
            useful_tokens=dict(steps.useful_tokens),
            padding_tokens=dict(steps.padding_tokens),
            step_seconds=self.parts.costs.as_dict(),
        )
