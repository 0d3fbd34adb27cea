"""Shared memory for the ranks of a process group on one host, instead of sockets.

The group's first rank creates the segment, and the others open it through its ``/proc/PID/fd``: nothing is left behind,
and no parent has to pass it on. Either all ranks of the group connect, or none does.
"""

from __future__ import annotations

import contextlib
import os

import torch

from nxd_infer.comm.protocol import Collectives, NativeOperators
from nxd_infer.comm.shm import MAX_DEGREE, ShmCollectives, create_segment
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError

DTYPES = frozenset(
    (
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""Dtypes that the native operators can sum."""


def connect(
    transport: Collectives,
    context: ParallelContext,
    axis: str,
    first_pid: int,
    library: NativeOperators | None,
    timeout: float,
) -> ShmCollectives | None:
    """Connect the ranks of ``axis``, which all call this; return None if one of them cannot.

    ``transport`` already connects them. ``first_pid`` is the process of the axis's first rank. ``library`` is None on a
    rank without one. ``timeout``: seconds that a collective waits for its peers.
    """
    here = context.axis(axis)
    if here.degree > MAX_DEGREE:
        return None
    descriptor, found = -1, None
    if here.rank == 0 and library is not None:
        descriptor = create_segment(here.degree)
    try:
        theirs = int(transport.broadcast(torch.tensor(descriptor), axis))
        if theirs >= 0 and library is not None:
            with contextlib.suppress(OSError, CollectiveError):
                if here.rank > 0:
                    descriptor = os.open(f"/proc/{first_pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
                scope = f"@{context.collectives}"
                found = ShmCollectives(library, context, {axis: descriptor}, timeout=timeout, scope=scope)
        all_can = transport.all_reduce(torch.tensor(int(found is not None)), axis, "min").item()
    finally:
        if descriptor >= 0:  # the others have opened it, or never will
            os.close(descriptor)
    if found is not None and not all_can:
        found.close()
        return None
    return found
