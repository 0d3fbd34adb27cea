"""The optimizer of a recipe, and its learning rate over the steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nxd_infer.recipes.schema import Optim, Sched

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw_fp32OptState": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def optimizer_arguments(optim: Optim) -> dict[str, Any]:
    """Return the arguments of the optimizer's class."""
    common: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if optim.name.startswith("adam"):
        return {**common, "betas": tuple(optim.betas), "eps": optim.eps, "fused": True}
    common |= {} if optim.name == "adagrad" else {"momentum": optim.momentum}
    return common | ({} if optim.name == "sgd" else {"eps": optim.eps})


def parameter_groups(model: nn.Module, optim: Optim, decay_norms: bool) -> list[dict[str, Any]]:
    """Return the trained parameters: norms and biases in a group without weight decay, unless ``decay_norms``."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if decay_norms or not optim.weight_decay:
        return [{"params": [param for _, param in trained]}]
    return [  # on every rank of a pipeline, also where its stage has no parameter of one
        {"params": [param for _, param in trained if param.dim() > 1]},
        {"params": [param for _, param in trained if param.dim() <= 1], "weight_decay": 0.0},
    ]


def rate_of(sched: Sched, lr: float, steps: int) -> Callable[[int], float]:
    """Return the factor of ``lr`` by the step, counted from 0, of ``steps``: what LambdaLR takes.

    As in NxD Training: LinearAnnealingWithWarmUp is transformers' linear schedule, which rises from 0. The others are
    NeMo's, which rise from above 0; its cosine with ``constant_steps`` is Megatron's, and rises from 0.
    """
    low = sched.min_lr / lr if lr else 0.0
    total = sched.max_steps if sched.max_steps and sched.max_steps > 0 else steps
    warmup = sched.warmup_steps if sched.warmup_ratio is None else int(sched.warmup_ratio * total)
    from_0 = ("LinearAnnealingWithWarmUp", "CosineAnnealing" if sched.constant_steps else "")
    span = max(1, total - warmup - sched.constant_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup if sched.name in from_0 else (step + 1) / (warmup + 1)
        if sched.name in ("WarmupHoldPolicy", "ConstantWithWarmUp"):
            return 1.0
        done = min(1.0, (step - warmup) / span)
        falling = (1 + math.cos(math.pi * done)) / 2 if sched.name == "CosineAnnealing" else 1 - done
        return low + (1 - low) * falling

    return factor


def scheduler_of(optimizer: torch.optim.Optimizer, optim: Optim, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Return what moves the learning rate; without a section ``sched`` it stays."""
    sched = Sched(name="ConstantWithWarmUp") if optim.sched is None else optim.sched
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(sched, optim.lr, steps))
