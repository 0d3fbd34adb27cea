"""The dtypes that a recipe's section ``precision`` stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nxd_infer.recipes.schema import Recipe


@dataclass(frozen=True)
class Dtypes:
    weights: torch.dtype
    master_weights: bool
    fp32_grad_acc: bool
    autocast: bool
    """Whether matrix products run in bfloat16, whatever the weights are."""

    @property
    def products(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else self.weights


def dtypes(recipe: Recipe) -> Dtypes:
    """Return what a recipe trains in. Stochastic rounding is Trainium's; the rounding here is to the nearest."""
    precision = recipe.precision
    kind = precision.type
    if kind in ("fp32", "autocast"):
        return Dtypes(torch.float32, False, False, kind == "autocast")
    wide = kind.startswith("mixed_precision")
    weights = torch.bfloat16
    if kind == "manual":
        narrow = {str(precision.xla_use_bf16), str(precision.xla_downcast_bf16)} & {"1", "True", "true"}
        weights = torch.bfloat16 if narrow else torch.float32
    masters = wide if precision.master_weights is None else precision.master_weights
    sums = wide if precision.fp32_grad_acc is None else precision.fp32_grad_acc
    return Dtypes(weights, masters and weights != torch.float32, sums and weights != torch.float32, False)
