"""Training on XLA's replicas: threads of this process, one per rank, each with a device.

    losses = train_on_replicas(train, tp=2, dp=2)       # train(replica) runs once per rank

It shows that layers and optimizers compute on an XLA device what they compute on the CPU; nothing of it is fast. Model
parallelism is not initialised: each replica has its own current context.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from nxd_infer.backends import xla
from nxd_infer.backends.xla.backend import BACKEND
from nxd_infer.backends.xla.replicas import replicas_of
from nxd_infer.comm import register_collectives, unregister_collectives
from nxd_infer.context import ParallelContext, make_context, rank_layout, use_context
from nxd_infer.errors import BackendUnavailableError, ParallelConfigError
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
    meetings = xla.transport.meetings_of(rank_layout(world, tp), timeout)

    def on_replica(rank: int) -> _Result:
        key, device = f"replica {rank}", replicas.devices[rank]
        context = make_context(world, rank, tp=tp, collectives=key)
        register_collectives(key, xla.transport.ReplicaCollectives(context, device, meetings))
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
