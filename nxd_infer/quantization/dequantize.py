"""From weights to quantized ones and back: ``weight = quantized * scale``, rounded to nearest.

Scales are symmetric: the largest absolute value becomes the largest number of the dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_infer.ops.packed import LARGEST


def largest(dtype: torch.dtype) -> float:
    """Return the largest number that quantized values of ``dtype`` have."""
    return torch.finfo(dtype).max if dtype.is_floating_point else LARGEST


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


def quantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``weight / scale`` in ``dtype``, clamped and rounded to nearest (ties to even)."""
    wide = (weight.float() / scale).clamp(-largest(dtype), largest(dtype))
    return (wide if dtype.is_floating_point else wide.round()).to(dtype)


def direct_cast_dequantize(tensor: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Return the quantized values themselves, without scales."""
    return tensor.to(upcast_dtype)


def scale_dequantize(tensor: Tensor, scale: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Return ``tensor * scale`` (shapes as they broadcast), multiplied in float32, in ``upcast_dtype``."""
    return (tensor.float() * scale).to(upcast_dtype)
