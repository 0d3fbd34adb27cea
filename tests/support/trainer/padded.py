"""A model whose three heads do not divide, as ported code has it, for ``nxd_config["pad_model"]``."""

from __future__ import annotations

from types import SimpleNamespace

import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.pad import get_number_of_extra_heads
from nxd_infer.parallel_layers.utils import divide

HEADS, DIM, HIDDEN = 3, 4, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        tp = current_context().tp.degree
        self.num_heads = divide(HEADS + get_number_of_extra_heads(HEADS, tp), tp)
        self.q, self.k, self.v = (ColumnParallelLinear(HIDDEN, HEADS * DIM, gather_output=False) for _ in range(3))
        self.o = RowParallelLinear(HEADS * DIM, HIDDEN, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class UnpaddedModel(nn.Module):
    """``forward(x, y)`` is a mean loss over [B, S, E]."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=HEADS)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y)
