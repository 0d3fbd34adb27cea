"""Modules made of parallel layers. Names are resolved on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {"GQAQKVColumnParallelLinear": "qkv_linear"}
_MODULES = ("lora", "qkv_linear", "wrapper")

if TYPE_CHECKING:
    from nxd_infer.modules import lora
    from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear

__all__ = ["GQAQKVColumnParallelLinear", "lora"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
