"""Build a model for sequence parallelism.

Between the parallel blocks, activations are split along the sequence. To do that, a model passes
``sequence_parallel_enabled=True`` to its parallel layers and norms (``layer_norm.LayerNorm``, or any norm whose
parameters are marked with ``layer_norm.mark_sequence_parallel``). While it is built, it can ask whether to do so::

    sequence_parallel = building_sequence_parallel()   # nxd_config["sequence_parallel"], in initialize_parallel_model
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from torch import nn

__all__ = ["build_sequence_parallel", "building_sequence_parallel", "is_sequence_parallel_model"]

_building: contextvars.ContextVar[bool] = contextvars.ContextVar("nxd_sequence_parallel", default=False)


def building_sequence_parallel() -> bool:
    """Return whether to build a sequence-parallel model; False outside :func:`build_sequence_parallel`."""
    return _building.get()


@contextlib.contextmanager
def build_sequence_parallel(enabled: bool = True) -> Iterator[None]:
    """Make :func:`building_sequence_parallel` return ``enabled`` inside the block."""
    token = _building.set(enabled)
    try:
        yield
    finally:
        _building.reset(token)


def is_sequence_parallel_model(model: nn.Module) -> bool:
    """Return whether any layer of ``model`` splits the sequence."""
    return any(getattr(module, "sequence_parallel_enabled", False) for module in model.modules())
