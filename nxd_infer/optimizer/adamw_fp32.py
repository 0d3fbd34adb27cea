"""AdamW whose state is float32, whatever the dtype of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nxd_infer.errors import ParallelConfigError

__all__ = ["AdamW_FP32OptimParams"]


class AdamW_FP32OptimParams(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) in float32: moments, and the step, are rounded once at its end.

    The weight decay is applied to the stepped weight, as in transformers' AdamW. Parameters of float64 have a state of
    float64. ``correct_bias=False`` leaves the moments as they are, which begin at zero.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "correct_bias": correct_bias})  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have gradients. Raises ParallelConfigError for sparse ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        if param.grad is None or param.grad.is_sparse:
            raise ParallelConfigError("AdamW takes no sparse gradients: use SparseAdam, or sparse=False")
        wide, (beta1, beta2) = torch.promote_types(param.dtype, torch.float32), group["betas"]
        state, grad = self.state[param], param.grad.to(wide)
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(param, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=wide)
        state["step"] += 1
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        rate = group["lr"]
        if group["correct_bias"]:
            rate = rate * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        stepped = param.to(wide, copy=True).addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate)
        param.copy_(stepped.mul_(1 - group["lr"] * group["weight_decay"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; moments keep float32, which ``Optimizer`` would round to the parameters' dtype."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        for param, values in ((params[place], values) for place, values in state_dict["state"].items()):
            wide = torch.promote_types(param.dtype, torch.float32)
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[param][name] = values[name].to(param.device, wide, copy=True)
