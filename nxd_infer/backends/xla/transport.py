"""Collectives among the replicas of this process, for training: each is a program of its own.

What a replica recorded before is run first, without the others. So ranks may differ in all that they compute between
two collectives (padding, pieces of ZeRO-1), as programs that exchange values may not; and a value that is read in
between, which makes torch_xla compile on the spot, is none that a replica waits for.
"""

from __future__ import annotations

import threading
from typing import Any, NoReturn

from torch import Tensor

from nxd_infer.backends.hlo import xla_api as xla
from nxd_infer.context import AXES, Axis, ParallelContext, RankLayout
from nxd_infer.errors import CollectiveError, CollectiveTimeoutError


class Meeting:
    """Where the replicas of one group wait for each other, ``seconds`` at most."""

    def __init__(self, group: Axis, seconds: float):
        self._group, self._seconds = group, seconds
        self._all = threading.Barrier(group.degree)
        self._calls: list[Any] = [None] * group.degree

    def agree(self, place: int, call: tuple[Any, ...]) -> None:
        """Wait for the others. Replicas that run different programs would end the process: raises CollectiveError where
        one comes to another ``call``, CollectiveTimeoutError where one does not come."""
        self._calls[place] = call
        self.wait()
        calls = list(self._calls)
        self.wait()  # before any of them writes its next one
        for other, rank in zip(calls, self._group.ranks, strict=True):
            if other != call:
                raise CollectiveError(
                    f"rank {self._group.ranks[place]} calls {call} and rank {rank} {other}: every rank of axis "
                    f"{self._group.name!r} must make the same calls"
                )

    def wait(self) -> None:
        try:
            self._all.wait(self._seconds)
        except threading.BrokenBarrierError as error:
            raise CollectiveTimeoutError(
                f"of the ranks {list(self._group.ranks)} of axis {self._group.name!r}, one failed or did not reach a "
                f"collective within {self._seconds:g} s"
            ) from error

    def end(self) -> None:
        """Nobody waits here any more."""
        self._all.abort()


def meetings_of(layout: RankLayout, seconds: float) -> dict[tuple[int, ...], Meeting]:
    """A meeting for each group, by its ranks."""
    groups = [layout.axis(axis, rank) for axis in AXES for rank in range(layout.world_size)]
    return {group.ranks: Meeting(group, seconds) for group in groups}


class ReplicaCollectives:
    """``comm.Collectives`` of the replica on ``device``."""

    def __init__(self, context: ParallelContext, device: str, meetings: dict[tuple[int, ...], Meeting]):
        self._context, self._device, self._meetings = context, device, meetings

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        return self._run("all_reduce", x, axis, op)

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._run("all_gather", x, axis, dim)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._run("reduce_scatter", x, axis, dim)

    def broadcast(self, x: Tensor, axis: str, src: int = 0) -> Tensor:
        return self._run("broadcast", x, axis, src)

    def send(self, x: Tensor, axis: str, dst: int) -> NoReturn:
        raise CollectiveError(_NO_MESSAGES)

    def recv(self, x: Tensor, axis: str, src: int) -> NoReturn:
        raise CollectiveError(_NO_MESSAGES)

    def barrier(self, axis: str) -> None:
        self._meetings[self._context.axis(axis).ranks].wait()

    def close(self) -> None:
        """The replicas live as long as their process."""

    def _run(self, name: str, x: Tensor, axis: str, argument: Any) -> Tensor:
        here, groups = self._context.axis(axis), self._context.layout.groups(axis)
        meeting = self._meetings[here.ranks]
        xla.use_device(self._device)  # a backward pass runs in a thread of autograd's
        given = x.detach().to(self._device).clone()  # of a view, the program would cut out its piece, by its offset
        xla.step()
        meeting.agree(here.rank, (name, argument, x.dtype, *x.shape))
        result = getattr(xla, name)(given, axis, argument, here.degree, groups)
        xla.step()
        meeting.wait()
        xla.wait(self._device)
        meeting.wait()
        return result.to(x.device)


_NO_MESSAGES = "replicas of XLA have no messages between two ranks: train with tensor and data parallelism"
