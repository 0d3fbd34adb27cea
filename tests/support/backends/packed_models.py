"""Models with linears in every form that user code writes them in; importable by the rank processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

WIDTH, INNER, VOCAB = 32, 48, 64


class Tied(nn.Module):
    """An embedding whose table is the head's weight, around a parallel pair of linears."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(VOCAB, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, INNER, gather_output=False)
        self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = ColumnParallelLinear(WIDTH, VOCAB, bias=False, gather_output=True)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(F.gelu(self.up(hidden)))
        return self.head(hidden * self.norm)


def tied(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Tied()


def tied_weights(seed: int = 0) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tied(seed).state_dict().items()}


def tied_checkpoint() -> dict[str, Tensor]:
    return tied_weights()


class Wide(nn.Module):
    """One weight of 16 MiB in bfloat16, and a small one that stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(2048, 4096, bias=False)
        self.scale = nn.Parameter(torch.ones(2048))

    def forward(self, x: Tensor) -> Tensor:
        return self.big(x * self.scale)


def wide(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Wide().bfloat16()


def wide_checkpoint() -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in wide().state_dict().items()}
