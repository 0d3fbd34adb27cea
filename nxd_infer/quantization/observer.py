"""The scales that tensors need: symmetric, so that the largest absolute value becomes the largest number of a dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_infer.quantization.dequantize import largest


def absolute_maximum(weight: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the largest absolute values in float32: for each index of ``dims``, with size 1 in other dimensions; for
    no ``dims`` of all, ``[1]``."""
    others = [dim for dim in range(weight.dim()) if dim not in dims]
    maximum = weight.abs().amax(others, keepdim=True).float()
    return maximum if dims else maximum.reshape(1)


def scale_for(maximum: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scales for which ``maximum`` becomes the largest number of ``dtype``; 1 for zeros."""
    scale = maximum / largest(dtype)
    return torch.where(scale == 0, 1.0, scale)
