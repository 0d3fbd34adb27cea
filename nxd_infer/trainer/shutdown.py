"""The end of a training process."""

from __future__ import annotations

import traceback

import torch.distributed as dist

from nxd_infer import comm
from nxd_infer.checkpoint.api import wait_for_save
from nxd_infer.comm.distributed import DistributedCollectives
from nxd_infer.context import ParallelContext
from nxd_infer.parallel_state import destroy_model_parallel
from nxd_infer.util.devices import group_exists

__all__ = ["give_up", "shutdown"]


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
    """Leave the other ranks because of the exception that is being handled, so that none of them waits for this one."""
    transport = comm.collectives_of(context) if context.world_size > 1 else None
    if isinstance(transport, DistributedCollectives):
        transport.give_up(traceback.format_exc())
