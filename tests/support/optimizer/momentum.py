"""An optimizer with attributes and methods of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.support.trainer.jobs import ZERO1, mine, training
from tests.support.trainer.models import decoder, tokens

SETTINGS: list[dict[str, Any]] = [{}, {"mixed_precision_config": {"use_master_weights": True}}, ZERO1]


class Momentum(torch.optim.Optimizer):
    """An optimizer with attributes, a property and methods of its own, in words of its own."""

    def __init__(self, params: Any, lr: float, decay: float = 0.5):
        super().__init__(params, {"lr": lr, "decay": decay})
        self.scale, self.kind = 1.0, "momentum"

    @property
    def rate(self) -> float:
        return self.scale * self.param_groups[0]["lr"]

    def speed_of(self, factor: float) -> list[float]:
        return [factor * float(state["speed"].norm()) for state in self.state.values()]

    @torch.no_grad()
    def stop(self, also_weights: bool = False) -> str:
        for group in self.param_groups:
            group["lr"] = 0.25
            for param in group["params"]:
                self.state[param]["speed"].zero_()
                if also_weights:
                    param.zero_()
        return "stopped"

    @torch.no_grad()
    def step(self, closure: Any = None, times: int = 1) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                speed = self.state[param].setdefault("speed", torch.zeros_like(param))
                speed.mul_(group["decay"]).add_(param.grad)
                param.sub_(speed, alpha=times * self.scale * group["lr"])


def momentum(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any]:
    model, optimizer = training(partial(decoder, "llama", dtype), optimizer_class=Momentum, **options)
    model.run_train(**mine(tokens()))
    optimizer.step()
    return model, optimizer
