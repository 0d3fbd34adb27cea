"""A tiny Mixtral-like language model; ``forward(input_ids)`` is its mean loss, load balancing included."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.modules.moe import ExpertMLPs, MoE, RouterTopK, SharedExperts, load_balancing_loss_func
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.layer_norm import LayerNorm
from nxd_infer.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_infer.parallel_layers.mappings import scatter_to_sequence_parallel_region
from nxd_infer.parallel_layers.sequence_parallel import building_sequence_parallel

VOCABULARY, HIDDEN, HEADS, INNER, EXPERTS, TOP_K = 48, 16, 4, 12, 4, 2


class Block(nn.Module):
    """Attention and a mixture of experts over [S, B, H]."""

    def __init__(self, dtype: torch.dtype, sequence_parallel: bool, shared: bool, **options):
        super().__init__()
        here = {"sequence_parallel_enabled": sequence_parallel, "dtype": dtype}
        self.norm, self.norm2 = LayerNorm(HIDDEN, **here), LayerNorm(HIDDEN, **here)
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, False, False, stride=3, **here)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, False, True, **here)
        self.moe = MoE(
            RouterTopK(EXPERTS, TOP_K, HIDDEN, dtype=dtype),
            ExpertMLPs(EXPERTS, TOP_K, HIDDEN, INNER, "silu", dtype=dtype, **options),
            SharedExperts(HIDDEN, 8, 1, "silu", dtype=dtype) if shared else None,
            sequence_parallel_enabled=sequence_parallel,
            return_router_logits=True,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(0, 2) for part in self._qkv(x))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(0, 2).flatten(2))
        y, logits = self.moe(self.norm2(x))
        return x + y, logits

    def _qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm(x)).chunk(3, -1)


class TinyMixtral(nn.Module):
    """``parts``: the batch's rows are so many batches, each with a load balancing loss of its own."""

    def __init__(self, dtype: torch.dtype = torch.float64, parts: int = 1, shared: bool = False, **options):
        super().__init__()
        self.sequence_parallel_enabled = building_sequence_parallel()
        self.parts = max(1, parts // current_context().dp.degree)
        self.embed = ParallelEmbedding(VOCABULARY, HIDDEN, dtype=dtype)
        options = {"normalize_top_k_affinities": True, **options}
        here = self.sequence_parallel_enabled
        self.blocks = nn.ModuleList(Block(dtype, here, shared, **options) for _ in range(2))
        self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, False, False, here, dtype)

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.stack([self.loss(ids) for ids in input_ids.chunk(self.parts)]).mean()

    def loss(self, ids: Tensor) -> Tensor:
        x, logits = self.embed(ids).transpose(0, 1), []
        if self.sequence_parallel_enabled:
            x = scatter_to_sequence_parallel_region(x)
        for block in self.blocks:
            x, routed = block(x)
            logits.append(routed)
        y = self.head(x)[:-1]
        balance = load_balancing_loss_func(torch.cat(logits), EXPERTS, TOP_K)
        return parallel_cross_entropy(y, ids.T[1:].contiguous()).mean() + 0.1 * balance


def texts(rows: int = 4, length: int = 8) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))}
