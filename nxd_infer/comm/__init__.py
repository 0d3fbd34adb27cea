"""Collectives behind one small protocol. No code outside this package calls a collective library.

Layers call the functions of :mod:`nxd_infer.comm.functional`. At degree 1 they return their input. During export they
become operators with an axis *name* (``nxd::all_reduce(x, "tp", ...)``), so that the graphs of all ranks are equal;
otherwise they run on the transport registered for the context.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxd_infer.comm.functional import all_gather, all_reduce, axis_rank, barrier, broadcast, reduce_scatter, shard
    from nxd_infer.comm.protocol import Collectives, collectives_of, register_collectives, unregister_collectives

__all__ = [
    "Collectives",
    "all_gather",
    "all_reduce",
    "axis_rank",
    "barrier",
    "broadcast",
    "collectives_of",
    "reduce_scatter",
    "register_collectives",
    "shard",
    "unregister_collectives",
]

_PROTOCOL = ("Collectives", "collectives_of", "register_collectives", "unregister_collectives")


def __getattr__(name: str) -> Any:
    """Import on first use: code that starts and watches ranks needs this package's shared memory, but not torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "nxd_infer.comm.protocol" if name in _PROTOCOL else "nxd_infer.comm.functional"
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value
