"""Observers: the scales of the tensors that they have seen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_infer.quantization.arithmetic import absolute_maximum, scale_for


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
