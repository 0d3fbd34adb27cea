"""The same logical weights at every degree.

A parameter is initialised by filling its *logical* tensor exactly as ``nn.Linear`` or ``nn.Embedding`` would, drawing
from the generator in the same order, and keeping this rank's part. So one seed gives one model, whatever the degree.
The whole tensor exists only while it is being cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from nxd_infer.layout import TensorLayout
from nxd_infer.layout.shard import fill_tensor

Fill = Callable[[Tensor], object]
"""Fills a tensor in place."""


def init_linear_weight(weight: Tensor) -> None:
    """As ``nn.Linear`` and ``nn.Conv2d`` fill their weight."""
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def init_linear_bias(fan_in: int) -> Fill:
    """As ``nn.Linear`` fills its bias; ``fan_in`` is the logical one, not a rank's."""
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return partial(torch.nn.init.uniform_, a=-bound, b=bound)


@torch.no_grad()
def logical_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Fill) -> Tensor:
    """A whole logical tensor, filled."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    fill(whole)
    return whole


def keep_own_part(param: Tensor, layout: TensorLayout, logical: Mapping[str, Tensor]) -> None:
    """Copy into ``param`` what ``layout`` says it holds of the ``logical`` tensors, and its filling."""
    fill_tensor(param.detach(), logical, layout)
