"""Steps that were given to the ranks: each occupies a side of the arena until its outputs are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nxd_infer.errors import StepsPendingError
from nxd_infer.runtime.ipc.arena import Side
from nxd_infer.runtime.supervisor.lock import CallLock
from nxd_infer.runtime.time_bounds import Bounds

if TYPE_CHECKING:
    import numpy as np

    from nxd_infer.runtime.supervisor.protocol import Ranks


def free_side(ranks: Ranks) -> tuple[int, Any]:
    """Return number and side for the next step's inputs and outputs. Raises StepsPendingError if none is free, and
    ModelClosedError if the ranks have ended."""
    ranks.check()
    for number, side in enumerate(ranks.sides):
        if not side.taken:
            if side.last is not None:
                ranks.finish(side.last)  # its caller was interrupted, or dropped it
            return number, side
    count = {2: "two", 3: "three"}.get(len(ranks.sides), str(len(ranks.sides)))
    raise StepsPendingError(f"{count} steps were begun already: take the result of one of them first")


class PendingStep:
    """A step that was given to the ranks. A caller that drops it discards the outputs."""

    def __init__(self, ranks: Ranks, lock: CallLock, side: Side, bucket: int, bounds: Bounds):
        self._ranks, self._lock, self._side, self._exchange = ranks, lock, side, side.last
        self._outputs, self._bucket, self._bounds = side.output_arrays[bucket], bucket, bounds
        side.taken = True

    @property
    def seconds(self) -> float:
        """How long the slowest rank worked on it; valid once it is over."""
        return self._exchange.seconds

    def result(self, copy: bool = True) -> dict[str, np.ndarray]:
        """Wait for the step, at most the call's timeout; return outputs by name. Without ``copy`` they are valid until
        the next step begins.

        Raises what ``run_bucket`` raises if ranks fail, in this step or an earlier one, and StepsPendingError if the
        outputs were already taken, or a wait for them was interrupted.
        """
        with self._lock.take():
            return self.take(copy)

    def take(self, copy: bool) -> dict[str, np.ndarray]:
        """Like :meth:`result`, for a caller that holds the lock."""
        if not self._waits:
            raise StepsPendingError("the step's outputs were taken, or a wait for them was interrupted: run it again")
        try:
            self._ranks.finish(self._exchange)
            self._bounds.called(self._bucket, self._exchange.seconds)
            return {name: array.copy() for name, array in self._outputs.items()} if copy else self._outputs
        finally:
            self.drop()

    @property
    def _waits(self) -> bool:
        return self._side.taken and self._side.last is self._exchange

    def drop(self) -> None:
        """Discard the outputs."""
        if self._waits:
            self._side.taken = False

    __del__ = drop
