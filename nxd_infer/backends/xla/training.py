"""Training on XLA's replicas: threads of this process, one per rank, each with a device.

    losses = train_on_replicas(train, tp=2, dp=2)       # train(replica) runs once per rank

It shows that layers and optimizers compute on an XLA device what they compute on the CPU; nothing of it is fast. Model
parallelism is not initialised: each replica has its own current context.

Each collective among the replicas is a program of its own. What a replica recorded before is run first, without the
others. So ranks may differ in all that they compute between two collectives (padding, pieces of ZeRO-1), as programs
that exchange values may not; and a value that is read in between, which makes torch_xla compile on the spot, is none
that a replica waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from nxd_infer.backends.xla.backend import BACKEND
from nxd_infer.backends.xla.replicas import replicas_of
from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import AXES, Axis, ParallelContext, RankLayout, make_context, rank_layout, use_context
from nxd_infer.errors import BackendUnavailableError, CollectiveError, CollectiveTimeoutError, ParallelConfigError
from nxd_infer.util.options import whole_number

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Replica:
    """One rank of a training."""

    context: ParallelContext
    device: torch.device
    alone: threading.Lock
    """One replica at a time: ``with replica.alone:`` around what draws random numbers, whose generator they share."""


def train_on_replicas(
    work: Callable[[Replica], _Result], *, tp: int = 1, dp: int = 1, timeout: float = 300.0
) -> list[_Result]:
    """Call ``work(replica)`` for each of ``tp * dp`` ranks at once, and return the results in their order.

    ``work`` builds its rank's model, moves it to ``replica.device``, and trains it there with the layers and optimizers
    of this package. ``timeout``: seconds that a replica waits in a collective for the others.

    Needs torch_xla, in a process that has not started it; all calls of a process must have equally many ranks. Raises
    what a replica raises, BackendUnavailableError without torch_xla or so many devices, and ParallelConfigError for a
    degree below 1.
    """
    for name, degree in (("tp", tp), ("dp", dp)):
        whole_number(name, degree, ParallelConfigError, minimum=1)
    world = tp * dp
    if not (found := BACKEND.probe()):
        raise BackendUnavailableError(found.reason)
    replicas = replicas_of(world)
    alone = threading.Lock()
    meetings = _meetings_of(rank_layout(world, tp), timeout)

    def on_replica(rank: int) -> _Result:
        key, device = f"replica {rank}", replicas.devices[rank]
        context = make_context(world, rank, tp=tp, collectives=key)
        register_collectives(key, _ReplicaCollectives(context, device, meetings))
        try:
            with use_context(context), torch.enable_grad():
                return work(Replica(context, torch.device(device), alone))
        except BaseException:
            for meeting in meetings.values():
                meeting.end()
            raise
        finally:
            unregister_collectives(key)

    return replicas.run(on_replica, seconds=None)  # as long as the training is; each wait in it is bounded


# --- the transport --------------------------------------------------------------------------------------


class _Meeting:
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


def _meetings_of(layout: RankLayout, seconds: float) -> dict[tuple[int, ...], _Meeting]:
    """A meeting for each group, by its ranks."""
    groups = [layout.axis(axis, rank) for axis in AXES for rank in range(layout.world_size)]
    return {group.ranks: _Meeting(group, seconds) for group in groups}


class _ReplicaCollectives:
    """``comm.Collectives`` of the replica on ``device``."""

    def __init__(self, context: ParallelContext, device: str, meetings: dict[tuple[int, ...], _Meeting]):
        self._context, self._device, self._meetings = context, device, meetings

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        return self._run("all_reduce", x, axis, op)

    def all_gather(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._run("all_gather", x, axis, dim)

    def reduce_scatter(self, x: Tensor, axis: str, dim: int) -> Tensor:
        return self._run("reduce_scatter", x, axis, dim)

    def broadcast(self, x: Tensor, axis: str, src: int = 0) -> Tensor:
        return self._run("broadcast", x, axis, src)

    def all_to_all(self, x: Tensor, axis: str) -> NoReturn:
        raise CollectiveError(_NO_MESSAGES)

    def send(self, x: Tensor, axis: str, dst: int) -> NoReturn:
        raise CollectiveError(_NO_MESSAGES)

    def recv(self, x: Tensor, axis: str, src: int) -> NoReturn:
        raise CollectiveError(_NO_MESSAGES)

    def barrier(self, axis: str) -> None:
        self._meetings[self._context.axis(axis).ranks].wait()

    def close(self) -> None:
        """The replicas live as long as their process."""

    def _run(self, name: str, x: Tensor, axis: str, argument: Any) -> Tensor:
        from nxd_infer.backends.hlo import xla_api as xla  # which the replicas have imported

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
