"""Who prints and writes."""

from __future__ import annotations

import torch.distributed as dist

from nxd_infer.context import current_context


def is_rank_zero() -> bool:
    """Return whether this process prints and writes: it is the first rank, or the only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return current_context().rank == 0
