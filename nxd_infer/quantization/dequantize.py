"""Floating-point weights of quantized ones."""

from __future__ import annotations

import torch
from torch import Tensor


def direct_cast_dequantize(tensor: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Return the quantized values themselves, without scales."""
    return tensor.to(upcast_dtype)


def scale_dequantize(tensor: Tensor, scale: Tensor, upcast_dtype: torch.dtype) -> Tensor:
    """Return ``tensor * scale`` (shapes as they broadcast), multiplied in float32, in ``upcast_dtype``."""
    return (tensor.float() * scale).to(upcast_dtype)
