"""Models with linears in the forms that user code writes them in; importable by the rank processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.ops import expert_linear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

WIDTH, INNER, VOCAB = 32, 48, 64


class Tied(nn.Module):
    """An embedding whose table is the head's weight, around parallel linears, two of which read one input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = ParallelEmbedding(VOCAB, WIDTH)
        self.up = ColumnParallelLinear(WIDTH, INNER, gather_output=False)
        self.gate = ColumnParallelLinear(WIDTH, INNER, gather_output=False)
        self.down = RowParallelLinear(INNER, WIDTH, input_is_parallel=True)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = ColumnParallelLinear(WIDTH, VOCAB, bias=False, gather_output=True)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(F.gelu(self.up(hidden)) * self.gate(hidden))
        return self.head(hidden * self.norm)


PACKED_OF_TIED = {"embed.weight", "up.weight", "gate.weight", "down.weight"}


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


class Siblings(nn.Module):
    """Linears ``a``, ``b`` and ``c`` of eight features, used as ``forward`` says, and a state."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("a", "b", "c"):
            layer = nn.Linear(8, 6 if name == "a" else 4)
            nn.init.normal_(layer.weight, generator=generator)
            nn.init.normal_(layer.bias, generator=generator)
            setattr(self, name, layer)
        self.register_buffer("seen", torch.ones(5, 8))
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def three_of_one_input(m: Any, x: Tensor) -> Tensor:
    return torch.cat((m.a(x), m.b(x), m.c(x)), -1)


def with_and_without_a_bias(m: Any, x: Tensor) -> Tensor:
    return torch.cat((m.a(x), F.linear(x, m.b.weight), F.linear(x, m.c.weight)), -1)


class Forms(nn.Module):
    """Weights in bfloat16 of every form that is packed without rounding: of a linear layer, of its transpose, of
    experts, and one that is stored in eight bits; no size is a multiple of a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(45, 33).bfloat16())
        self.across = nn.Parameter(torch.randn(45, 37).bfloat16())
        self.experts = nn.Parameter(torch.randn(3, 41, 37).bfloat16())
        self.stored = nn.Parameter(torch.randint(-128, 128, (35, 41), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(35, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.up) @ self.across
        hidden = expert_linear(hidden, self.experts, torch.arange(x.shape[0]) % 3)
        return F.linear(hidden, (self.stored.float() * self.scale).to(hidden.dtype))


def forms(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Forms()


def forms_weights(seed: int = 0) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in forms(seed).state_dict().items()}


def chain(seed: int = 0) -> nn.Module:
    """Two layers that can be two pipeline stages."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(33, 45), nn.Linear(45, 37)).bfloat16()


def chain_weights(seed: int = 0) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in chain(seed).state_dict().items()}
