"""``python -m tests.integration.xla.run_trap NAME``: something on replicas that went wrong once, alone."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from nxd_infer import comm
from nxd_infer.backends.xla.replicas import replicas_of
from nxd_infer.backends.xla.training import Replica, train_on_replicas
from nxd_infer.errors import BackendUnavailableError, CollectiveError


def replicas_and_api(count: int) -> tuple[Any, Any]:
    replicas = replicas_of(count)
    from nxd_infer.backends.hlo import xla_api  # which needs torch_xla started

    return replicas, xla_api


def collectives() -> Any:
    """Each of them, on four replicas."""
    replicas, xla = replicas_and_api(4)

    def work(rank: int) -> list[Any]:
        x = (torch.arange(8.0).reshape(2, 4) + rank).to(replicas.devices[rank])
        found = [
            xla.all_reduce(x, "tp", "sum", 4),
            xla.all_reduce(x, "tp", "max", 4),
            xla.all_gather(x, "tp", 1, 4),
            xla.reduce_scatter(x, "tp", 1, 4),
            xla.broadcast(x, "tp", 2, 4),
            xla.all_gather(x > 5, "tp", 0, 4),
        ]
        replicas.step()
        return [tensor.cpu().tolist() for tensor in found]

    return replicas.run(work)


def infinity() -> Any:
    """An infinity is gathered before other values are."""
    replicas, xla = replicas_and_api(2)

    def work(rank: int) -> Any:
        device = replicas.devices[rank]
        xla.all_gather(torch.full((2,), float("-inf")).to(device), "tp", 0, 2)
        later = xla.all_reduce(torch.ones(2).to(device), "tp", "sum", 2)
        replicas.step()
        return later.cpu().tolist()

    return replicas.run(work)


def many() -> Any:
    """Collectives that do not wait for each other, on more replicas than there are processors."""
    replicas, xla = replicas_and_api(4)
    given = [[torch.ones(64, 64).to(device) for _ in range(20)] for device in replicas.devices]

    def work(rank: int) -> float:
        found = []
        for number, x in enumerate(given[rank]):
            y = (x @ x) / 64  # ones, however it is rounded
            found.append(xla.all_gather(y, "tp", 0, 4) if number % 2 else xla.all_reduce(y, "tp", "sum", 4))
        replicas.step()
        return found[-1].cpu().mean().item()

    return [replicas.run(work) for _ in range(5)]


def in_place() -> Any:
    """Tensors that each step writes where they are."""
    replicas, xla = replicas_and_api(2)
    states = [torch.zeros(64, 64).to(device) for device in replicas.devices]

    def work(rank: int) -> None:
        states[rank].add_(xla.all_reduce(torch.ones(64, 64, device=replicas.devices[rank]), "tp", "sum", 2))
        replicas.step()

    for _ in range(20):
        replicas.run(work)
    return [state.cpu().mean().item() for state in states]


def stuck() -> Any:
    """One replica does not come to a collective."""
    replicas, xla = replicas_and_api(2)

    def work(rank: int) -> None:
        kept = None if rank else xla.all_reduce(torch.ones(2).to(replicas.devices[rank]), "tp", "sum", 2)
        replicas.step()
        assert (kept is None) == bool(rank)

    return replicas.run(work)


def raises() -> Any:
    """One replica raises: the others do not wait for it, and none is used again."""
    replicas = replicas_of(2)

    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("no")
        replicas.step()

    said = []
    for _ in range(2):
        try:
            replicas.run(work)
        except Exception as error:
            said.append(type(error).__name__)
    return said


def reads() -> Any:
    """Training: a value is read between two collectives, each on another number, and a view is gathered."""

    def work(replica: Replica) -> Any:
        rank = replica.context.rank
        x = torch.arange(4.0, device=replica.device)
        own = (x + rank).sum().item()
        total = comm.all_reduce(x * own, replica.context)
        piece = comm.all_gather(total.chunk(2)[rank], replica.context, dim=0)
        return [own, total.sum().item(), piece.tolist(), bool(piece.isfinite().all())]

    return train_on_replicas(work, tp=2)


def others() -> Any:
    """Training: the replicas come to different collectives, and then one to none."""
    said = []

    def different(replica: Replica) -> None:
        x = torch.ones(2, device=replica.device)
        if replica.context.rank:
            comm.all_gather(x, replica.context)
        else:
            comm.all_reduce(x, replica.context)

    def alone(replica: Replica) -> None:
        if replica.context.rank:
            comm.all_reduce(torch.ones(2, device=replica.device), replica.context)

    for work, timeout in ((different, 60.0), (alone, 2.0)):
        try:
            train_on_replicas(work, tp=2, timeout=timeout)
        except CollectiveError as error:
            said.append([type(error).__name__, str(error)])
    return said


def counted() -> Any:
    """Devices are counted when the runtime starts."""
    said = []
    replicas_of(1)
    try:
        replicas_of(2)
    except BackendUnavailableError as error:
        said.append(str(error))
    return said


def started() -> Any:
    """Somebody has started the runtime before."""
    import torch_xla

    torch_xla.device()
    try:
        replicas_of(2)
    except BackendUnavailableError as error:
        return str(error)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))  # and no os._exit: the interpreter ends by itself
