"""Modules made of parallel layers. Names are resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

_MODULES = ("lora", "moe", "qkv_linear", "wrapper")

if TYPE_CHECKING:
    from nxd_infer.modules import lora
    from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear

__all__ = ["GQAQKVColumnParallelLinear", "lora"]

__getattr__, __dir__ = lazy_names(__name__, {".qkv_linear": "GQAQKVColumnParallelLinear"}, _MODULES)
