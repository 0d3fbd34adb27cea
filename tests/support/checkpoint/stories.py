"""What jobs save and load again: on one rank in tests/unit, with ZeRO-1 over two in tests/integration."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import nxd_infer as nxd
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.errors import CheckpointError
from tests.support.trainer.jobs import ZERO1, mine, train, training
from tests.support.trainer.models import MLP, mlp, vectors

Optimizer = torch.optim.Optimizer


def sequential(optimizer: Optimizer) -> Any:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=2)
    return schedules.SequentialLR(optimizer, [warm, schedules.MultiStepLR(optimizer, [1, 2, 2, 4], 0.5)], [2])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "multi_step": lambda optimizer: schedules.MultiStepLR(optimizer, [2, 4, 4, 5], 0.5),
    "sequential": sequential,
    "cosine": lambda optimizer: schedules.CosineAnnealingLR(optimizer, 7),
    "one_cycle": lambda optimizer: schedules.OneCycleLR(optimizer, 1e-2, 9),
}


def job(name: str, zero1: bool, seed: int = 0, lr: float = 1e-3) -> tuple[Any, Any, Any]:
    """Two groups; the first has a rate of its own, and the rates are tensors."""
    config = nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1, "bucket_cap_mb": 0.001})
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(config, mlp)
    first, *rest = [param for name, param in model.named_parameters() if name != "unused"]
    groups = [{"params": [first], "lr": torch.tensor(3e-3), "weight_decay": 0.1}, {"params": rest}]
    rate = torch.tensor(lr, dtype=torch.float64)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=rate)
    return model, optimizer, SCHEDULES[name](optimizer)


def go_on(parts: tuple[Any, Any, Any], count: int) -> list[float]:
    model, optimizer, scheduler = parts
    losses = []
    for _ in range(count):
        losses += train(model, optimizer, mine(vectors(model.dtype)))
        if scheduler is not None:
            scheduler.step()
    return losses


def same_weights(model: Any, other: Any) -> bool:
    wanted = model.state_dict()
    return all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())


def schedules_go_on(root: str, zero1: bool) -> None:
    """A tensor rate is stored in its own type, and a schedule finds its own kinds of containers again."""
    for name in SCHEDULES:
        first = job(name, zero1)
        go_on(first, 3)
        named = dict(zip(("model", "optimizer", "scheduler"), first, strict=True))
        save_checkpoint(root, name, **named, async_save=name == "cosine")
        wanted = go_on(first, 4)
        other = job(name, zero1, seed=4, lr=0.5)
        load_checkpoint(root, name, *other)
        assert go_on(other, 4) == wanted, name
        for mine_, theirs in zip(first[1].param_groups, other[1].param_groups, strict=True):
            assert type(mine_["lr"]) is type(theirs["lr"]) and mine_["lr"] == theirs["lr"], name
            assert not isinstance(mine_["lr"], torch.Tensor) or mine_["lr"].dtype == theirs["lr"].dtype
        assert same_weights(first[0], other[0]), name
        if name == "multi_step":
            assert other[2].milestones == collections.Counter([2, 4, 4, 5])
            assert type(other[2].milestones) is collections.Counter


def masters_are_the_weights(root: str, zero1: bool) -> None:
    """Weights that are loaded after the optimizer was made, saved before it has stepped: the masters are theirs."""
    options = {
        "optimizer_config": {"zero_one_enabled": zero1, "bucket_cap_mb": 0.001},
        "mixed_precision_config": {"use_master_weights": True},
    }
    build = partial(MLP, torch.bfloat16)
    torch.manual_seed(7)
    pretrained = build().state_dict()
    model, optimizer = training(build, **options)
    model.load_state_dict(pretrained)
    save_checkpoint(root, "files", model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    wanted = go_on((model, optimizer, None), 2)
    for how in ("files", "memory"):
        other, fresh = training(build, seed=3, **options)
        if how == "files":
            load_checkpoint(root, how, other, fresh)
        else:
            other.load_state_dict(pretrained)
            fresh.load_state_dict(state)
        assert go_on((other, fresh, None), 2) == wanted, how
        assert same_weights(model, other), how


def by_decay(model: nn.Module, swapped: bool = False) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    flat = [param for name, param in named if param.dim() == 1]
    groups = [
        {"params": [param for name, param in named if param.dim() > 1], "weight_decay": 0.5, "lr": 0.01},
        {"params": flat, "weight_decay": 0.0, "lr": 0.02},
    ]
    return groups[::-1] if swapped else groups


def stepped(**options: Any) -> tuple[Any, Any]:
    model, optimizer = training(mlp, **options)
    go_on((model, optimizer, None), 1)
    return model, optimizer


OTHERS: list[tuple[dict[str, Any], str]] = [
    (
        {"groups": partial(by_decay, swapped=True)},
        "parameter group 0 has other parameters than this optimizer's: .*pass the groups in the order",
    ),
    ({}, "has 2 parameter groups, this optimizer 1"),
    (
        {"groups": by_decay, "optimizer_class": torch.optim.SGD},
        r"is of another optimizer than this SGD: it has .*'betas'.* and not \['dampening', 'momentum', 'nesterov'\]",
    ),
]


def others_are_refused(root: str, zero1: bool) -> None:
    """Another optimizer or other groups. Hyperparameters go by the place of a group: in another order they would be
    given to the wrong parameters."""
    options = ZERO1 if zero1 else {}
    model, optimizer = stepped(groups=by_decay, **options)
    save_checkpoint(root, "a", model, optimizer)
    if zero1:
        optimizer.save_sharded_state_dict(root)
    for others, message in OTHERS:
        other, fresh = training(mlp, seed=3, **others, **options)
        weights, rates = copy.deepcopy(other.state_dict()), [group["lr"] for group in fresh.param_groups]
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(root, "a", other, fresh)
        if zero1:
            with pytest.raises(CheckpointError, match=message):
                fresh.load_sharded_state_dict(root)
        assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
        assert not fresh.state and [group["lr"] for group in fresh.param_groups] == rates
    other, fresh = training(mlp, seed=3, groups=by_decay, **options)
    load_checkpoint(root, "a", other, fresh)
    for parts in ((model, optimizer), (other, fresh)):
        go_on((*parts, None), 1)
    assert same_weights(model, other)
