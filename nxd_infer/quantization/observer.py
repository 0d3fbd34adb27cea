"""The scales that tensors need: symmetric, so that the largest absolute value becomes the largest number of a dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

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


class PerChannelAbsMaxObserver(nn.Module):
    """Keeps the largest absolute value of each index of dimension ``ch_axis``, over all tensors; returns them as they
    are."""

    max_val: Tensor

    def __init__(self, ch_axis: int = 0, dtype: torch.dtype = torch.int8):
        super().__init__()
        self.ch_axis, self.dtype = ch_axis, dtype
        self.register_buffer("max_val", torch.zeros(0))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        seen = absolute_maximum(x, [self.ch_axis % x.dim()]).flatten()
        self.max_val = torch.maximum(self.max_val, seen) if self.max_val.numel() else seen
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the scales for ``dtype``, and zero points, which are zeros."""
        scale = scale_for(self.max_val, self.dtype)
        return scale, torch.zeros_like(scale, dtype=torch.int64)
