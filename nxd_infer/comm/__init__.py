"""Collectives behind one small protocol. No code outside this package calls a collective library.

Layers call the functions of :mod:`nxd_infer.comm.functional`. At degree 1 they return their input. During export they
become operators with an axis *name* (``nxd::all_reduce(x, "tp", ...)``), so that the graphs of all ranks are equal;
otherwise they run on the transport registered for the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

if TYPE_CHECKING:
    from nxd_infer.comm.functional import (
        all_gather,
        all_reduce,
        all_to_all,
        axis_rank,
        barrier,
        broadcast,
        reduce_scatter,
        shard,
    )
    from nxd_infer.comm.protocol import Collectives, collectives_of, register_collectives, unregister_collectives

__all__ = [
    "Collectives", "all_gather", "all_reduce", "all_to_all", "axis_rank", "barrier", "broadcast", "collectives_of",
    "reduce_scatter", "register_collectives", "shard", "unregister_collectives",
]  # fmt: skip

# On first use: who starts ranks and watches them needs this package's shared memory, and no torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".functional": "all_gather all_reduce all_to_all axis_rank barrier broadcast reduce_scatter shard",
        ".protocol": "Collectives collectives_of register_collectives unregister_collectives",
    },
)
