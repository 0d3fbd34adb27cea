"""From weights to quantized ones and back: ``weight = quantized * scale``, rounded to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.ops.packed import LARGEST


def largest(dtype: torch.dtype) -> float:
    """Return the largest number that quantized values of ``dtype`` have."""
    return torch.finfo(dtype).max if dtype.is_floating_point else LARGEST


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
