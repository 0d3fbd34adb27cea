"""The ranks of a model as its callers see them, wherever they run: their interface, the lock of their one caller, and
the steps that were given to them."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nxd_infer.errors import ModelClosedError, StepsPendingError
from nxd_infer.runtime.ipc import Kind, Side
from nxd_infer.runtime.time_bounds import Bounds

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class RankHealth:
    """One entry of ``TensorParallelModel.health()``."""

    rank: int
    pid: int | None
    alive: bool
    state: str
    """``running``, ``stopped`` or ``ended``."""
    steps: int
    """Exchanges finished since the start."""
    collectives: int
    """Collectives passed since the start; 0 if the transport does not count them."""
    busy_seconds: float
    """How long the exchange in progress has taken so far; 0 between exchanges."""
    last_step_age: float | None
    """Seconds since the last exchange began; None before the first."""
    seconds: float = 0.0
    """Seconds of all exchanges finished since the start, without waits for an earlier stage."""


class Ranks(ABC):
    """Runs the graphs: in processes (:class:`Supervisor`) or, at degree 1, in this one (:class:`LocalRank`).

    Not thread-safe: the model's lock serialises its callers.
    """

    failure: BaseException | None = None
    """The error that ended the ranks, if any."""

    @property
    @abstractmethod
    def sides(self) -> Sequence[Any]:
        """Places for a step's inputs and outputs."""

    @abstractmethod
    def start(self) -> None:
        """Start every rank, and wait until all have loaded their graphs."""

    @abstractmethod
    def begin(
        self,
        kind: Kind,
        bucket: int = 0,
        side: int = 0,
        *,
        fds: Sequence[int] = (),
        timeout: float | None = None,
        fatal: bool = True,
    ) -> Any:
        """Have every rank do one thing after another; ``fds`` holds one descriptor for each rank. ``timeout``: time
        limit in seconds. With ``fatal=False`` a rank that raises leaves the ranks running."""

    @abstractmethod
    def finish(self, exchange: Any) -> None:
        """Wait until every rank has done what ``begin`` returned. Idempotent."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for all that was begun, so that the ranks are idle and the arena is free."""

    @abstractmethod
    def check(self) -> None:
        """Raise ModelClosedError unless the ranks can be called."""

    @abstractmethod
    def health(self) -> list[RankHealth]: ...

    @abstractmethod
    def close(self) -> None:
        """End every rank. Idempotent."""

    def exchange(
        self, kind: Kind, *, timeout: float | None = None, fds: Sequence[int] = (), fatal: bool = True
    ) -> None:
        """Have every rank do one thing, with no other pending, and wait for it."""
        self.settle()
        self.finish(self.begin(kind, timeout=timeout, fds=fds, fatal=fatal))


class CallLock:
    """``with lock.take():`` makes the caller the only one. Raises if it would wait for itself, or for a thread that
    does not exist in a forked process.

    Returns the lock itself as context manager, so that it is released whatever a signal handler raises.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.RLock()

    def take(self) -> AbstractContextManager[object]:
        if os.getpid() != self.owner:
            raise of_another_process(self.owner)
        if self.lock._is_owned():  # type: ignore[attr-defined]  # like threading.Condition
            raise ModelClosedError("the model was used by a signal handler in the middle of one of its calls")
        return self.lock


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
    """A step that was given to the ranks: it occupies a side of the arena until its outputs are taken. A caller that
    drops it discards them."""

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


def of_another_process(owner: int) -> ModelClosedError:
    """The error of a call in a process that was forked from ``owner``, which started the ranks."""
    return ModelClosedError(
        f"the ranks of this model belong to process {owner}; a forked process must load the artifact itself"
    )
