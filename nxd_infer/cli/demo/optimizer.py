"""The demo's optimizer: Muon for the matrices of the layers, AdamW for the rest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.util.machine import computes_bfloat16

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration that makes a matrix nearly orthogonal (Jordan et al., "Muon", 2024)."""


class Float32Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with the learning rate of "match_rms_adamw" and its products in float32.

    PyTorch's are in bfloat16, whatever the weights are: seconds per step on a processor without such instructions.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                average = state["momentum_buffer"]
                average.lerp_(param.grad, 1 - group["momentum"])
                update = orthogonalized(param.grad.lerp(average, group["momentum"]))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(param.shape)))
        return loss


def orthogonalized(matrix: Tensor, steps: int = 5) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` and singular values near 1."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Updates groups with ``muon=True`` by Muon and the others by AdamW.

    A rank orthogonalises its own shard of a matrix. This differs from the update of the whole matrix, but works as well
    here and needs no communication.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "muon": False})
        self._inner = [self._inner_of(group) for group in self.param_groups]

    @staticmethod
    def _inner_of(group: dict[str, Any]) -> torch.optim.Optimizer:
        if group["muon"]:
            inner: torch.optim.Optimizer = (
                torch.optim.Muon(group["params"], adjust_lr_fn="match_rms_adamw")
                if computes_bfloat16()
                else Float32Muon(group["params"])
            )
        else:
            inner = torch.optim.AdamW(group["params"], betas=(0.9, 0.95), fused=True)
        for name, value in inner.defaults.items():
            group.setdefault(name, value)
        return inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for inner, group in zip(self._inner, self.param_groups, strict=True):
            inner.param_groups, inner.state = [group], self.state  # share this optimizer's state, also after a load
            inner.step()
        return loss


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of a decoder.

    With so few steps Muon's orthogonal updates pay off: 80 s on one core gave 1.36 bits per byte, AdamW alone 1.90.
    """
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    known = {id(p) for p in matrices}
    return [
        {"params": matrices, "muon": True},
        {"params": [p for p in model.parameters() if id(p) not in known]},
    ]
