"""Resolve a ``process_group`` argument to an axis.

The reference's layers take a process group. Ours keep an axis name, because a module that holds a group cannot be
copied or pickled, and a group's name differs from rank to rank.
"""

from __future__ import annotations

from nxd_infer.context import AXES, ParallelContext
from nxd_infer.errors import ParallelConfigError


def axis_of(process_group: object, context: ParallelContext) -> str:
    """Return the axis of a process group: tp for ``None``, an axis name itself, or the axis with the group's ranks.

    A group is a torch.distributed group, a list of ranks, or a list of such lists, of which the one with this rank is
    used (``get_tensor_model_parallel_group(as_list=True)``).

    Raises ParallelConfigError for an unknown axis name and for a group that is not one of this rank's.
    """
    if process_group is None:
        return "tp"
    if isinstance(process_group, str):
        if process_group in AXES:
            return process_group
        raise ParallelConfigError(f"there is no parallel axis {process_group!r}; the axes are {', '.join(AXES)}")
    ranks = _ranks_of(process_group, context.rank)
    for axis in ("tp", "cp", "dp", "pp"):
        if context.axis(axis).ranks == ranks:
            return axis
    raise ParallelConfigError(
        f"the process group {process_group!r} with ranks {list(ranks)} is not a parallel group of rank {context.rank}; "
        f"pass None or one of the axis names {', '.join(AXES)}"
    )


def _ranks_of(process_group: object, rank: int) -> tuple[int, ...]:
    """Return the global ranks of a group; of several groups, those of the group with ``rank``."""
    import torch.distributed as dist

    if isinstance(process_group, list | tuple):
        several = [group for group in process_group if isinstance(group, list | tuple)]
        return tuple(next((group for group in several if rank in group), () if several else process_group))

    if dist.is_available() and isinstance(process_group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(process_group))
    ranks = getattr(process_group, "ranks", None)
    if ranks is not None:
        return tuple(ranks)
    raise ParallelConfigError(
        f"a process group must be None, an axis name or a group of parallel_state, got {type(process_group).__name__}"
    )
