"""Gradients of logical tensors, for the tests of norms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import shard_state_dict, weight_layout


def logical_gradients(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """A random gradient for every logical tensor of a model, in the type of its first parameter."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    shapes: dict[str, tuple[int, ...]] = {}
    for layout in weight_layout(model).values():
        if not layout.alias_of:
            shapes.update(layout.logical_shapes)
    return {name: torch.randn(shape, dtype=dtype, generator=generator) for name, shape in shapes.items()}


def give(model: nn.Module, logical: dict[str, Tensor]) -> None:
    tp = current_context().tp
    mine = shard_state_dict(model, logical, tp.rank, tp.degree)
    for name, param in model.named_parameters():
        param.grad = mine[name].clone()
