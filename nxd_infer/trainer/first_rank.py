"""Whether this process is the one that prints and writes files."""

from __future__ import annotations

import torch.distributed as dist

from nxd_infer.context import current_context
from nxd_infer.util.devices import group_exists


def is_rank_zero() -> bool:
    """Return whether this process prints and writes: it is the first rank, or the only one."""
    if group_exists():
        return dist.get_rank() == 0
    return current_context().rank == 0
