"""The end of a training process."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

import torch.distributed as dist

from nxd_infer import comm
from nxd_infer.checkpoint.api import wait_for_save
from nxd_infer.checkpoint.async_save import outstanding
from nxd_infer.comm.distributed import DistributedCollectives
from nxd_infer.context import ParallelContext
from nxd_infer.parallel_state import destroy_model_parallel
from nxd_infer.util.devices import group_exists

__all__ = ["give_up", "outlast_save", "shutdown"]

SAVE_SECONDS = 300.0
"""How long a failed job waits for the checkpoint that other ranks are writing."""


def shutdown() -> None:
    """Wait for an asynchronous save and for all ranks, forget the parallel groups and destroy the process group.

    Does nothing without groups. Call it last on every rank: if a gloo process exits early, gloo aborts its peers.
    """
    try:
        wait_for_save()
    finally:
        up = group_exists()
        if up:
            dist.barrier()
        destroy_model_parallel()
        if up:
            dist.destroy_process_group()


def give_up(context: ParallelContext) -> None:
    """Leave the other ranks because of the exception that is being handled, so that none of them waits for this one.

    Forgets the parallel groups, which are of no use any more: the process may train again.
    """
    transport = comm.collectives_of(context) if context.world_size > 1 else None
    if isinstance(transport, DistributedCollectives):
        transport.give_up(traceback.format_exc())
    destroy_model_parallel()


def outlast_save(folder: Path, rank: int) -> None:
    """Wait until an asynchronous save into ``folder`` is complete or has failed, on the first rank and on others.

    For a job that failed: a launcher ends all ranks once one has ended, also those that are still writing. Nobody can
    be asked any more, so the others look at the folder, for at most ``SAVE_SECONDS``.
    """
    outstanding.join()
    deadline = time.monotonic() + SAVE_SECONDS
    while rank > 0 and any(folder.glob(".saving-*")) and time.monotonic() < deadline:
        time.sleep(0.1)
