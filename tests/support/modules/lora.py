"""Small models with adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

ALL = ["embed", "qkv", "out_proj", "up_proj", "down_proj", "head"]
MERGED = {"save_lora_base": True, "merge_lora": True}


class Net(nn.Module):
    """One of every parallel layer, and a plain one."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.embed = ParallelEmbedding(10, 8, dtype=dtype)
        names = {"q": "../q_proj", "k": "../k_proj", "v": "../v_proj"}
        self.qkv = GQAQKVColumnParallelLinear(
            8, [8, 4], gather_output=False, head_dim=4, logical_names=names, dtype=dtype
        )
        self.out_proj = RowParallelLinear(8, 8, input_is_parallel=True, input_plan=self.qkv.q_plan, dtype=dtype)
        self.up_proj = ColumnParallelLinear(8, 12, gather_output=False, dtype=dtype)
        self.down_proj = RowParallelLinear(12, 8, input_is_parallel=True, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.head = nn.Linear(8, 5, dtype=dtype)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x)
        copies = q.shape[-1] // k.shape[-1]
        k, v = (t.unflatten(-1, (-1, 4)).repeat_interleave(copies, -2).flatten(-2) for t in (k, v))
        x = x + self.out_proj(torch.tanh(q * k) + v)
        y = self.head(self.norm(x + self.down_proj(torch.tanh(self.up_proj(x)))))
        return y if labels is None else nn.functional.cross_entropy(y.flatten(0, -2), labels.flatten())


def batch() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(4)
    return {
        "ids": torch.randint(0, 10, (4, 6), generator=numbers),
        "labels": torch.randint(0, 5, (4, 6), generator=numbers),
    }


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def lora(seed: int = 0, dtype: torch.dtype = torch.float32, filled: bool = True, **options: Any) -> LoRAModel:
    options = {"lora_rank": 3, "target_modules": ALL, **options}
    model = LoRAModel(net(seed, dtype), LoraConfig(**options))
    if filled:
        with torch.no_grad():
            for name in sorted(model.adapter_names):
                model.get_parameter(name).normal_()
    return model


class Shared(nn.Module):
    """One layer under two names, and something that is no weight."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


class Pair(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, tied: bool = True, head_first: bool = False):
        super().__init__()
        if head_first:
            self.head = nn.Linear(8, 10, bias=False)
        self.embed, self.mid = nn.Embedding(10, 8), nn.Linear(8, 8)
        if not head_first:
            self.head = nn.Linear(8, 10, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(ids)))


IDS = torch.arange(10)


def adapted(module: nn.Module, **options: Any) -> LoRAModel:
    model = LoRAModel(module, LoraConfig(lora_rank=2, **options))
    torch.manual_seed(1)
    for param in model.parameters():
        if param.requires_grad:
            nn.init.normal_(param)
    return model
