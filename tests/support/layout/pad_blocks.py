"""Small models that write parallel layers in the ways ported code does, for the tests of ``pad_model``."""

import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from tests.support.layout.pad_models import attend

F64 = torch.float64


class Gathered(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = ParallelEmbedding(11, 6, dtype=F64)
        self.up = ColumnParallelLinear(6, 9, bias=True, gather_output=True, dtype=F64)
        self.down = RowParallelLinear(9, 6, bias=True, input_is_parallel=False, dtype=F64)
        self.head = ColumnParallelLinear(6, 11, bias=False, gather_output=True, dtype=F64)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(torch.tanh(self.up(self.embed(ids)))))


class BertSelf(nn.Module):
    def __init__(self, kv=6):
        super().__init__()
        self.query, self.key, self.value = (
            ColumnParallelLinear(6, size, gather_output=False, dtype=F64) for size in (6, kv, kv)
        )

    def forward(self, x):
        return attend(self.query(x), self.key(x), self.value(x), 2, causal=False)


class BertOutput(nn.Module):
    def __init__(self, size=6):
        super().__init__()
        self.dense = RowParallelLinear(size, 6, input_is_parallel=True, dtype=F64)

    def forward(self, x):
        return self.dense(x)


class BertLayer(nn.Module):
    def __init__(self, kv=6):
        super().__init__()
        self.attention = nn.ModuleDict({"self": BertSelf(kv), "output": BertOutput()})
        self.intermediate = ColumnParallelLinear(6, 10, gather_output=False, dtype=F64)
        self.output = BertOutput(10)

    def forward(self, x):
        x = self.attention["output"](self.attention["self"](x))
        return self.output(torch.sigmoid(self.intermediate(x)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(6, 12, gather_output=False, dtype=F64)
        self.down = RowParallelLinear(12, 6, input_is_parallel=True, dtype=F64)

    def forward(self, x):
        return self.down(torch.sigmoid(self.up(x)))


class StridedBlock(nn.Module):
    """A fused c_attn of three sections in one logical tensor, and a gated MLP whose gate and up are one layer."""

    def __init__(self, heads=3, head_dim=2, inner=9):
        super().__init__()
        size = heads * head_dim
        self.head_dim = head_dim
        self.c_attn = ColumnParallelLinear(size, 3 * size, stride=3, gather_output=False, dtype=F64)
        self.c_proj = RowParallelLinear(size, size, input_is_parallel=True, dtype=F64)
        self.gate_up = ColumnParallelLinear(size, 2 * inner, stride=2, gather_output=False, dtype=F64)
        self.down = RowParallelLinear(inner, size, input_is_parallel=True, dtype=F64)
        self.split_size = size // current_context().tp.degree

    def forward(self, x):
        x = self.c_proj(attend(*self.c_attn(x).split(self.split_size, -1), self.head_dim, causal=False))
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.sigmoid(gate) * up)
