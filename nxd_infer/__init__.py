"""Shard a PyTorch model, trace each rank ahead of time, save, load and serve it.

    import nxd_infer as nxd

    model = nxd.trace.parallel_model_trace(get_model, example_inputs, tp_degree=2)
    nxd.trace.parallel_model_save(model, "artifact")
    model = nxd.trace.parallel_model_load("artifact")
    outputs = model(*tensors)

Submodules are imported when they are first touched: ``import nxd_infer`` itself loads nothing, not even torch, so that
``nxd-infer --help`` answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nxd_infer import backends, errors, layout, modules, parallel_layers, parallel_state, trace

__all__ = [
    "__version__",
    "backends",
    "errors",
    "layout",
    "modules",
    "parallel_layers",
    "parallel_state",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"nxd_infer.{name}")
    raise AttributeError(f"module 'nxd_infer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
