"""Loops in which something else touches what an optimizer trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.optimizer import NxDOptimizer

BF16 = torch.bfloat16


def sgd(params: Any, lr: float = 0.5, **options: Any) -> NxDOptimizer:
    return NxDOptimizer(params, torch.optim.SGD, grad_clipping=False, defaults={"lr": lr}, **options)


def linear(dtype: torch.dtype = BF16) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4, bias=False, dtype=dtype)


def backward(*layers: nn.Linear) -> None:
    nn.Sequential(*layers)(torch.ones(1, 4, dtype=layers[0].weight.dtype)).sum().backward()


def moved(weight: Tensor, optimizer: NxDOptimizer) -> bool:
    before = weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return not torch.equal(before, weight)


class Filling(torch.optim.SGD):
    def look(self) -> float:
        return self.param_groups[0]["lr"]

    def fill(self, value: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.fill_(value)


def filled_through_data(**options: Any) -> list[float]:
    layer = linear(BF16 if options.get("master_weights") else torch.float32)
    optimizer: Any = NxDOptimizer(layer.parameters(), Filling, defaults={"lr": 0.5}, **options)
    optimizer.fill(0.5 if current_context().dp.rank == 0 else 0.25)
    return layer.weight.flatten().tolist()
