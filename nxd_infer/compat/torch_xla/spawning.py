"""``torch_xla.launch`` and ``xla_multiprocessing.spawn``: processes for ranks, where no launcher has started them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from nxd_infer.comm.launched import launched_world
from nxd_infer.compat.torch_xla.runtime import global_ordinal

_COUNTS = ("NEURONCORE_NUM_DEVICES", "CPU_NUM_DEVICES")
"""Environment variables of the number of processes, as torch_xla's devices have them."""


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Call ``fn(rank, *args)`` in ``nprocs`` processes (None: NEURONCORE_NUM_DEVICES or CPU_NUM_DEVICES, else 1).

    In a process of a launcher, and for one process, it is called here. Returns None, or with ``join=False`` the context
    of ``torch.multiprocessing.spawn``.
    """
    count = nprocs or next((int(os.environ[name]) for name in _COUNTS if name in os.environ), 1)
    if count == 1 or launched_world() > 1:
        fn(global_ordinal(), *args)
        return None
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # pyright: ignore
    started = start_processes(
        _run, (fn, args, count, store.port), count, join=join, daemon=daemon, start_method=start_method
    )
    if started is not None:
        started.store = store  # pyright: ignore  # the ranks meet there
    return started


def _run(rank: int, fn: Callable[..., Any], args: tuple[Any, ...], count: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    place |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}  # the caller has the store
    os.environ.update({name: str(value) for name, value in place.items()})
    fn(rank, *args)


def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    start_method: str = "spawn",
    debug_single_process: bool = False,
) -> None:
    """Call :func:`spawn`, for one process if ``debug_single_process``."""
    spawn(fn, args, 1 if debug_single_process else None, start_method=start_method)
