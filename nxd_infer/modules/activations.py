"""Activation functions by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.errors import ParallelConfigError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "tanh": torch.tanh,
}
_OTHER_NAMES = {"swish": "silu", "gelu_python": "gelu", "gelu_fast": "gelu_pytorch_tanh"}


def known_activation(name: str) -> str:
    """Return the key of ACTIVATIONS that ``name`` means. Raises ParallelConfigError for an unknown one."""
    name = _OTHER_NAMES.get(name, name)
    if name not in ACTIVATIONS:
        raise ParallelConfigError(f"unknown activation {name!r}; known are {', '.join([*ACTIVATIONS, *_OTHER_NAMES])}")
    return name
