"""Helpers of the layer tests: relative errors, and this rank's part of a plain tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import fill_tensor, layout_of
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 2e-2}


def error(a: Tensor, b: Tensor) -> float:
    """max|a-b| / max|b|; infinite when shapes or types differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    scale = b.abs().max().item() or 1.0
    return ((a.double() - b.double()).abs().max().item()) / scale


def own_part(module: nn.Module, name: str, whole: Tensor) -> Tensor:
    """What this rank's ``module.<name>`` holds of the plain tensor ``whole``; all of it without a layout."""
    layout = layout_of(module, name)
    if layout is None:
        return whole
    tp = current_context().tp
    part = torch.empty(layout.rank_shape(tp.degree), dtype=whole.dtype)
    fill_tensor(part.detach(), {"": whole}, layout.rank_layout(tp.degree, tp.rank))
    return part


def piece(x: Tensor, dim: int) -> Tensor:
    """This rank's equal piece of ``x``."""
    tp = current_context().tp
    return x.chunk(tp.degree, dim)[tp.rank]


def as_on_ranks(layer: GQAQKVColumnParallelLinear, part: str, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A projection's plain output with all places that it has on the ranks, and what takes this rank's of them."""
    if not layer.gather_output:
        degree = current_context().tp.degree
        plan = layer.q_plan if part == "q" else layer.kv_plan
        index = torch.cat([plan.rank_index(degree, rank) for rank in range(degree)])
        return F.pad(x, (0, 1)).index_select(-1, index), lambda places: piece(places, -1)
    copies = layer.kv_size_multiplier if part != "q" else 1
    if layer.head_dim is None:  # whole copies
        return torch.cat([x] * copies, -1), lambda places: places
    return x.unflatten(-1, (-1, layer.head_dim)).repeat_interleave(copies, -2).flatten(-2), lambda places: places


def failures(found: dict[str, float], limit: float) -> list[str]:
    """The cases past the limit, readable; NaN counts."""
    return [f"{name}: {value:.2e} > {limit:.0e}" for name, value in found.items() if not value < limit]
