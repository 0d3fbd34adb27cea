"""Small models of parallel layers for the trainer's tests; plain PyTorch at degree 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.layer_norm import LayerNorm
from nxd_infer.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from nxd_infer.parallel_layers.sequence_parallel import building_sequence_parallel
from nxd_models.llama.config import LlamaConfig, Mixture
from nxd_models.llama.model import CausalLM

CONFIG = LlamaConfig(
    model_type="llama",
    vocab_size=61,  # does not divide: the vocabulary is padded
    hidden_size=32,
    intermediate_size=46,  # neither does this
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    initializer_range=0.2,
)
FAMILIES = {
    "llama": {},
    "tied": {"tied": True},
    "odd_heads": {"num_heads": 6, "num_kv_heads": 3},  # padded and replicated at tp 4
    "qwen3": {"qk_norm": True, "tied": True},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "experts": {"mixture": Mixture(5, 2, 22, True)},  # which divides over no degree above 2
    "balanced": {"mixture": Mixture(6, 3, 20, False, (1,), 0.2), "num_layers": 3, "qk_norm": True},
}


def decoder(family: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    from dataclasses import replace

    return CausalLM(replace(CONFIG, **FAMILIES[family]), dtype)


def llama() -> CausalLM:
    return decoder("llama")


def tokens(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(0, CONFIG.vocab_size, (rows, length), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "labels": ids}


class MLP(nn.Module):
    """Two parallel blocks over [S, B, E] with biases, layer norms and a fused QKV; ``forward(x, y)`` is a mean loss."""

    def __init__(self, dtype: torch.dtype = torch.float32, hidden: int = 16):
        super().__init__()
        sp = self.sequence_parallel_enabled = building_sequence_parallel()
        here = {"sequence_parallel_enabled": sp, "dtype": dtype}
        self.norm = LayerNorm(hidden, **here)
        self.up = ColumnParallelLinear(hidden, 24, gather_output=False, **here)
        self.down = RowParallelLinear(24, hidden, input_is_parallel=True, **here)
        self.norm2 = LayerNorm(hidden, **here)
        self.qkv = GQAQKVColumnParallelLinear(hidden, [16, 8], gather_output=False, head_dim=4, **here)
        self.out = RowParallelLinear(16, hidden, input_is_parallel=True, **here, input_plan=self.qkv.q_plan)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        if self.sequence_parallel_enabled:
            x = scatter_to_sequence_parallel_region(x)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        q, k, v = self.qkv(self.norm2(x))
        group = q.shape[-1] // k.shape[-1]
        k, v = (t.unflatten(-1, (-1, 4)).repeat_interleave(group, -2).flatten(-2) for t in (k, v))
        x = x + self.out(torch.tanh(q * k) + v)
        if self.sequence_parallel_enabled:
            x = gather_from_sequence_parallel_region(x, to_model_parallel=False)
        return F.mse_loss(x.transpose(0, 1), y)


def mlp() -> MLP:
    return MLP()


def vectors(dtype: torch.dtype = torch.float32, rows: int = 4) -> dict[str, Tensor]:
    x, y = torch.randn(2, rows, 8, 16, dtype=dtype, generator=torch.Generator().manual_seed(3))
    return {"x": x, "y": y}


class Numbers(torch.utils.data.Dataset):
    """Sample i is i and a vector made of it."""

    def __init__(self, count: int = 22):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index), "x": torch.full((6,), index / 7.0).sin()}
