"""Initialise the same logical weights at every degree.

A parameter is initialised by filling its *logical* tensor exactly as ``nn.Linear`` or ``nn.Embedding`` would, drawing
from the generator in the same order, and keeping this rank's part. So one seed gives one model at any degree. The full
tensor exists only until this rank's part is copied.
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
    """Fill a weight as ``nn.Linear`` and ``nn.Conv2d`` do."""
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def init_linear_bias(fan_in: int) -> Fill:
    """Return the fill that ``nn.Linear`` uses for its bias; ``fan_in`` is the logical one, not a rank's."""
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    return partial(torch.nn.init.uniform_, a=-bound, b=bound)


@torch.no_grad()
def logical_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fill: Fill) -> Tensor:
    """Return a full logical tensor, filled by ``fill``."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    fill(whole)
    return whole


def keep_own_part(param: Tensor, layout: TensorLayout, logical: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of the ``logical`` tensors into ``param``, as ``layout`` says, and fill its padding."""
    fill_tensor(param.detach(), logical, layout)
