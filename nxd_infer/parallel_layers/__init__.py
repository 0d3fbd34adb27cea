"""Layers whose weights are split over ranks, and what belongs to them. Names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {
    "ColumnParallelLinear": "layers",
    "InputChannelParallelConv2d": "layers",
    "OutputChannelParallelConv2d": "layers",
    "ParallelEmbedding": "layers",
    "RowParallelLinear": "layers",
    "SPMDRank": "layers",
}
_MODULES = (
    "initialization",
    "layers",
    "mappings",
    "parallel_state",
    "utils",
)

if TYPE_CHECKING:
    from nxd_infer.parallel_layers.layers import (
        ColumnParallelLinear,
        InputChannelParallelConv2d,
        OutputChannelParallelConv2d,
        ParallelEmbedding,
        RowParallelLinear,
        SPMDRank,
    )

__all__ = [
    "ColumnParallelLinear",
    "InputChannelParallelConv2d",
    "OutputChannelParallelConv2d",
    "ParallelEmbedding",
    "RowParallelLinear",
    "SPMDRank",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_MODULES})
