"""How fast training is, and how fast it could be."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.parallel_layers.grads import counted_spans
from nxd_infer.recipes.plan import model_flops
from nxd_infer.trainer.first_rank import is_rank_zero
from nxd_infer.util.devices import HOST, transport_device

MEASURE_SECONDS = 0.3
"""How long a machine's speed is measured: something else may run there in between."""


@dataclass(frozen=True)
class Step:
    """An optimizer step over all ranks. Tensors are float64 scalars."""

    loss: Tensor
    rate: float
    """The learning rate of it."""
    seconds: float
    tokens: Tensor
    """Those that are not padding."""
    squares: Tensor
    """Sum of the squared lengths of their documents."""


class Speed:
    """Says how fast steps are: tokens, and operations that the model needs for them. Every rank makes one.

    ``raw``: the model's configuration. ``dtype``: of its matrix products. ``world``: ranks that do a step.
    """

    def __init__(self, model: nn.Module, raw: Mapping[str, Any], dtype: torch.dtype, world: int):
        self.raw = raw
        self.parameters, self.trained = count_parameters(model)
        on_host = next(model.parameters()).device.type == HOST.type
        self.peak = world * matmul_peak(dtype) if on_host and is_rank_zero() else math.nan
        """Operations per second of all ranks; only the first rank of a CPU knows it."""

    def tokens_per_second(self, step: Step) -> float:
        return float(step.tokens) / step.seconds

    def mfu(self, step: Step) -> float:
        """Return the model FLOP utilisation: padding, and what is computed again, do not count."""
        flops = model_flops(self.raw, self.parameters, self.trained, float(step.tokens), float(step.squares))
        return flops / step.seconds / self.peak


def count_parameters(model: nn.Module) -> tuple[float, float]:
    """Return how many parameters the ranks that share a model have, and how many are trained. Every rank calls it."""
    context, counts = current_context(), [0, 0]
    for param in model.parameters():
        own = sum(stop - start for start, stop in counted_spans(param))
        counts[0] += own
        counts[1] += own if param.requires_grad else 0
    found = torch.tensor(counts, dtype=torch.float64, device=transport_device())
    whole, trained = comm.all_reduce(comm.all_reduce(found, context, "tp"), context, "pp").tolist()
    return whole, trained


@functools.cache
def matmul_peak(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Return the floating-point operations per second of a square matrix product, with this process's threads."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while best == float("inf") or time.perf_counter() < end:
        begin = time.perf_counter()
        F.linear(a, b)  # some dtypes are slow in another layout
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
