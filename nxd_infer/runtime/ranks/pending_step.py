"""Steps that were handed to ranks: each has a side of the arena until its outputs are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nxd_infer.errors import StepsPendingError
from nxd_infer.runtime.ranks.arena import Side
from nxd_infer.runtime.ranks.lock import Turns
from nxd_infer.runtime.time_bounds import Bounds

if TYPE_CHECKING:
    import numpy as np

    from nxd_infer.runtime.ranks.base import Ranks


def free_side(ranks: Ranks) -> tuple[int, Any]:
    """A place for the next step's inputs and outputs, and its number. StepsPendingError when there is none."""
    for number, side in enumerate(ranks.sides):
        if not side.taken:
            if side.last is not None:
                ranks.finish(side.last)  # whoever waited for it was interrupted, or did not want to know
            return number, side
    raise StepsPendingError("two steps were begun already: take the result of one of them first")


class PendingStep:
    """A step that was handed to the ranks. Whoever drops it wants no outputs."""

    def __init__(self, ranks: Ranks, turn: Turns, side: Side, bucket: int, bounds: Bounds):
        self._ranks, self._turn, self._side, self._exchange = ranks, turn, side, side.last
        self._outputs, self._bucket, self._bounds = side.output_arrays[bucket], bucket, bounds
        side.taken = True

    @property
    def seconds(self) -> float:
        """How long the slowest rank worked on it, once it is over."""
        return self._exchange.seconds

    def result(self, copy: bool = True) -> dict[str, np.ndarray]:
        """Wait for the step, at most the call's timeout; outputs by name. Without ``copy`` they hold until the next
        step is begun.

        Raises what ``run_bucket`` raises when ranks fail, in this step or in one that was begun before it, and
        StepsPendingError when the outputs were taken already, or a wait for them was interrupted.
        """
        with self._turn.take():
            return self.take(copy)

    def take(self, copy: bool) -> dict[str, np.ndarray]:
        """As :meth:`result`, for a caller whose turn it is."""
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
        """Nobody takes the outputs any more."""
        if self._waits:
            self._side.taken = False

    __del__ = drop
