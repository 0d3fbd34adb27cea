"""Attention as ported code writes it, and the same in plain PyTorch, for the tests of ``pad_model``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import ParamLayout, load_weights, merge_state_dicts, weight_layout
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.pad import get_number_of_extra_heads, pad_model
from nxd_infer.parallel_layers.utils import divide

F64 = torch.float64


def attend(q: Tensor, k: Tensor, v: Tensor, head_dim: int, causal: bool = True) -> Tensor:
    """Attention over ``[length, heads * head_dim]``; each run of query heads shares a key/value head."""
    q, k, v = (t.unflatten(-1, (-1, head_dim)).transpose(0, 1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(0, 1).flatten(1)


class ParallelAttention(nn.Module):
    """Built for ``shape.heads`` heads whatever the degree; ``pad_model`` makes it fit."""

    def __init__(self, shape: Shape, style: str):
        super().__init__()
        tp = current_context().tp.degree
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.num_heads = divide(shape.heads + get_number_of_extra_heads(shape.heads, tp), tp)
        if style == "separate":
            self.q, self.k, self.v = (
                ColumnParallelLinear(shape.hidden, size, gather_output=False, dtype=F64) for size in (q, kv, kv)
            )
        else:
            self.qkv = GQAQKVColumnParallelLinear(
                shape.hidden,
                [q, kv],
                gather_output=False,
                dtype=F64,
                fuse_qkv=style == "fused",
                logical_names={name: f"../{name}" for name in "qkv"},
            )
        self.o = RowParallelLinear(q, shape.hidden, input_is_parallel=True, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        assert q.shape[-1] == self.num_heads * self.head_dim, "the query heads of a rank that the API guide has"
        return self.o(attend(q, k, v, self.head_dim))


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    x, seen = torch.randn(2, shape.length, shape.hidden, dtype=F64, generator=torch.Generator().manual_seed(5))
    return x, seen


def reference(shape: Shape) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and gradients of the logical weights of plain attention."""
    weights = {name: tensor.requires_grad_() for name, tensor in logical_weights(shape).items()}
    x, seen = inputs(shape)
    x.requires_grad_()
    q, k, v = (F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"]) for name in "qkv")
    y = F.linear(attend(q, k, v, shape.head_dim), weights["o.weight"], weights["o.bias"])
    y.backward(seen)
    return y.detach(), x.grad, {name: tensor.grad for name, tensor in weights.items()}


def padded_with_layouts(shape: Shape, style: str, loaded: str) -> tuple[Any, dict[str, ParamLayout]]:
    """On one rank: build, load before or after padding, pad, forward and backward; the results, and the layouts."""
    tp = current_context().tp
    model = ParallelAttention(shape, style)
    logical = logical_weights(shape)
    if loaded == "before":
        load_weights(model, logical, rank=tp.rank, degree=tp.degree)
    pad_model(model, tp.degree, shape.heads)
    if loaded == "after":
        load_weights(model, logical, rank=tp.rank, degree=tp.degree)
    x, seen = inputs(shape)
    x.requires_grad_()
    y = model(x)
    y.backward(seen)
    return (y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}), weight_layout(model)


def compare(results: list, shape: Shape, layouts: dict) -> float:
    """The largest relative difference of outputs and gradients from plain attention; gradients merged to logical."""
    expected = reference(shape)
    worst = 0.0
    for y, grad_x, _ in results:
        worst = max(worst, difference(y, expected[0]), difference(grad_x, expected[1]))
    merged = merge_state_dicts([grads for _, _, grads in results], layouts)
    if merged.keys() != expected[2].keys():
        raise AssertionError(f"{sorted(merged)} are not {sorted(expected[2])}")
    return max([worst, *(difference(merged[name], expected[2][name]) for name in merged)])


def difference(found: Tensor, expected: Tensor) -> float:
    # Gradients of key biases are zero in exact arithmetic: softmax ignores what all scores share.
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1.0)).item()


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int = 2
    hidden: int = 5
    length: int = 3


def logical_weights(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """q, k, v with biases and the output projection with its own, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64, generator=generator)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"q": (q, shape.hidden), "k": (kv, shape.hidden), "v": (kv, shape.hidden), "o": (shape.hidden, q)}
    weights = {f"{name}.weight": draw(*size) for name, size in sizes.items()}
    return weights | {f"{name}.bias": draw(size[0]) for name, size in sizes.items()}
