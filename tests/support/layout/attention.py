"""Plain attention, and the same attention with its weights placed on ranks by layouts alone (no processes)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.layout import AxisPlan, ParamLayout


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


def plain_attention(x: Tensor, w: dict[str, Tensor], shape: Shape, heads: int, kv_heads: int) -> Tensor:
    """Causal softmax attention of ``x`` [length, hidden] without the output bias; head i attends with i // group."""
    q = F.linear(x, w["q.weight"], w["q.bias"]).view(-1, heads, shape.head_dim)
    k = F.linear(x, w["k.weight"], w["k.bias"]).view(-1, kv_heads, shape.head_dim)
    v = F.linear(x, w["v.weight"], w["v.bias"]).view(-1, kv_heads, shape.head_dim)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / shape.head_dim**0.5
    mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
    return F.linear(out, w["o.weight"])


def layouts_of(q: AxisPlan, kv: AxisPlan, hidden: int) -> dict[str, ParamLayout]:
    """The layouts of the attention's parameters when q and o follow ``q``, and k and v follow ``kv``."""
    out = {"o.weight": ParamLayout.of([hidden, q], "o.weight")}
    for name, plan in (("q", q), ("k", kv), ("v", kv)):
        out[f"{name}.weight"] = ParamLayout.of([plan, hidden], f"{name}.weight")
        out[f"{name}.bias"] = ParamLayout.of([plan], f"{name}.bias")
    return out
