"""The end of a training process."""

from __future__ import annotations

import torch.distributed as dist

from nxd_infer.checkpoint.api import wait_for_save
from nxd_infer.parallel_state import destroy_model_parallel
from nxd_infer.util.devices import group_exists

__all__ = ["shutdown"]


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
