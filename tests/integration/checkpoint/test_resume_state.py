"""State of schedulers and groups other than numbers is restored exactly: training continues bit for bit."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedules

import nxd_infer as nxd
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import weight_layout
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import mine, training
from tests.support.trainer.models import MLP, decoder, mlp, tokens, vectors

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


def job(name: str, zero1: bool, seed: int = 0, lr: Any = None) -> tuple[Any, Any, Any]:
    """Two groups; the first has a rate of its own, and the rates are tensors."""
    config = nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": zero1, "bucket_cap_mb": 0.001})
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(config, mlp)
    first, *rest = [param for name, param in model.named_parameters() if name != "unused"]
    groups = [{"params": [first], "lr": torch.tensor(3e-3), "weight_decay": 0.1}, {"params": rest}]
    lr = torch.tensor(1e-3, dtype=torch.float64) if lr is None else lr
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, lr=lr)
    return model, optimizer, SCHEDULES[name](optimizer)


def go_on(parts: tuple[Any, Any, Any], count: int) -> list[float]:
    model, optimizer, scheduler = parts
    losses = []
    for _ in range(count):
        losses.append(float(model.run_train(**mine(vectors(model.dtype)))))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return losses


def resumed(root: str, zero1: bool) -> None:
    for name in SCHEDULES:
        first = job(name, zero1)
        go_on(first, 3)
        named = dict(zip(("model", "optimizer", "scheduler"), first, strict=True))
        save_checkpoint(root, name, **named, async_save=name == "cosine")
        wanted = go_on(first, 4)
        other = job(name, zero1, seed=4, lr=torch.tensor(0.5, dtype=torch.float64))
        load_checkpoint(root, name, *other)
        assert go_on(other, 4) == wanted, name
        for mine_, theirs in zip(first[1].param_groups, other[1].param_groups, strict=True):
            assert type(mine_["lr"]) is type(theirs["lr"]) and mine_["lr"] == theirs["lr"], name
            assert not isinstance(mine_["lr"], torch.Tensor) or mine_["lr"].dtype == theirs["lr"].dtype
        weights = first[0].state_dict()
        assert all(torch.equal(value, weights[key]) for key, value in other[0].state_dict().items()), name
        if name == "multi_step":
            assert other[2].milestones == collections.Counter([2, 4, 4, 5])
            assert type(other[2].milestones) is collections.Counter


@pytest.mark.parametrize("ranks", [1, 2])
def test_rates_that_are_tensors_and_schedules_go_on(tmp_path: Path, ranks: int):
    """A tensor rate is stored in its own type, and a schedule finds its own kinds of containers again."""
    run_ranks(resumed, ranks, str(tmp_path), ranks == 2, tp=1)


def resharded_file(root: str) -> None:
    model, optimizer, _ = job("cosine", True)
    go_on((model, optimizer, SCHEDULES["cosine"](optimizer)), 1)
    optimizer.save_sharded_state_dict(root)
    other = job("cosine", True, seed=2, lr=torch.tensor(0.25, dtype=torch.float64))[1]
    other.load_sharded_state_dict(root)
    assert other.param_groups[1]["lr"] == optimizer.param_groups[1]["lr"]
    assert other.param_groups[1]["lr"].dtype == torch.float64


def test_a_rate_that_is_a_tensor_in_sharded_files(tmp_path: Path):
    run_ranks(resharded_file, 2, str(tmp_path), tp=1)


def loaded_before_the_first_step(root: str, zero1: bool) -> None:
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
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items()), how


@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_are_saved_as_the_weights_are(tmp_path: Path, ranks: int):
    run_ranks(loaded_before_the_first_step, ranks, str(tmp_path), ranks == 2, tp=1)


def filled_otherwise(root: str) -> None:
    """Before the load, the model holds something else where it is filled up."""
    options = {"mixed_precision_config": {"use_master_weights": True}}
    build = partial(decoder, "llama", torch.bfloat16)
    jobs = []
    for seed in (0, 3):
        model, optimizer = training(build, seed=seed, **options)
        jobs.append((model, optimizer))
        layouts, tp = weight_layout(model.local_module()), current_context().tp
        fills = [(name, at) for name, one in layouts.items() for at, _ in one.rank_layout(2, tp.rank).fills()]
        assert tp.rank == 0 or fills
        if seed == 0:
            save_checkpoint(root, "a", model, optimizer)
            continue
        with torch.no_grad():
            for name, at in fills:
                model.get_parameter(name)[at] = 7.0
        load_checkpoint(root, "a", model, optimizer)
    for model, optimizer in jobs:
        model.run_train(**tokens())
        optimizer.step()
    weights = jobs[0][0].state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in jobs[1][0].state_dict().items())


def test_masters_are_filled_as_the_weights_are(tmp_path: Path):
    run_ranks(filled_otherwise, 2, str(tmp_path), tp=2)


def test_a_group_that_cannot_be_saved_is_named(tmp_path: Path):
    """Silently omitted, it would be missing from the resumed job."""
    config = nxd.neuronx_distributed_config()
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "note": object()}
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, [group], lr=1e-3)
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['note'\] is a object"):
        save_checkpoint(tmp_path, "a", optimizer=optimizer)
