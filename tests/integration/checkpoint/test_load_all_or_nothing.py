"""What does not fit is refused before anything changes: another optimizer, other groups, a weight that is tied here."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.trainer.data import ResumableLoader
from tests.integration.checkpoint.test_resume_state import sequential
from tests.support.e2e.command import nxd_infer_here
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, AdamW, training
from tests.support.trainer.models import mlp, vectors


def by_decay(model: nn.Module, swapped: bool = False) -> list[dict[str, Any]]:
    """Weights decay, biases and norms do not."""
    named = list(model.named_parameters())
    flat = [param for name, param in named if param.dim() == 1]
    groups = [
        {"params": [param for name, param in named if param.dim() > 1], "weight_decay": 0.5, "lr": 0.01},
        {"params": flat, "weight_decay": 0.0, "lr": 0.02},
    ]
    return groups[::-1] if swapped else groups


def stepped(**options: Any) -> tuple[Any, Any]:
    model, optimizer = training(mlp, **options)
    model.run_train(**vectors())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "swapped": (
        {"groups": lambda model: by_decay(model, swapped=True)},
        "parameter group 0 has other parameters than this optimizer's: .*pass the groups in the order",
    ),
    "one group": ({}, "has 2 parameter groups, this optimizer 1"),
    "sgd": (
        {"groups": by_decay, "optimizer_class": torch.optim.SGD},
        r"is of another optimizer than this SGD: it has .*'betas'.* and not \['dampening', 'momentum', 'nesterov'\]",
    ),
}


def refused(root: str, zero1: bool) -> None:
    options = ZERO1 if zero1 else {}
    model, optimizer = stepped(groups=by_decay, **options)
    save_checkpoint(root, "a", model, optimizer)
    if zero1:
        optimizer.save_sharded_state_dict(root)
    for others, message in OTHERS.values():
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
        parts[0].run_train(**vectors())
        parts[1].step()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_optimizer_or_other_groups(tmp_path: Path, ranks: int):
    """Hyperparameters go by the place of a group: in another order they would be given to the wrong parameters."""
    run_ranks(refused, ranks, str(tmp_path), ranks == 2, tp=1)


def test_what_was_not_saved_is_missed_before_anything_changes(tmp_path: Path):
    save_checkpoint(tmp_path, "a", *stepped())
    model, optimizer = training(mlp, seed=3)
    before = copy.deepcopy(model.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for wanted, message in (
        ({"scheduler": scheduler}, "holds no scheduler"),
        ({"dataloader": ResumableLoader([1])}, "holds no position in the data"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, "a", model, optimizer, **wanted)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state


def test_what_refuses_its_state_is_asked_before_anything_changes(tmp_path: Path):
    """The position in another dataset, the state of another kind of schedule."""
    model, optimizer = stepped()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(tmp_path, "a", model, optimizer, schedule, dataloader=ResumableLoader([1, 2, 3]))
    model, optimizer = training(mlp, seed=3)
    before = copy.deepcopy(model.state_dict())
    for wanted, message in (
        ({"dataloader": ResumableLoader([1, 2])}, "^the position in the data is from a loader with length 3"),
        ({"scheduler": sequential(optimizer)}, "the checkpoint's scheduler does not fit this one: '_schedulers'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, "a", model, optimizer, **wanted)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state


class Refusing:
    def state_dict(self) -> Any:
        raise ValueError("no state yet")


def one_rank_cannot(root: str) -> None:
    """Rank 1 has saved no position in the data, so it finds none; then it cannot save its own."""
    first = current_context().rank == 0
    save_checkpoint(root, "a", *stepped(), dataloader=ResumableLoader([1, 2]) if first else None)
    other, fresh = training(mlp, seed=3)
    before = copy.deepcopy(other.state_dict())
    loader = ResumableLoader([1, 2])
    with pytest.raises(CheckpointError, match="because another rank" if first else "holds no position in the data"):
        load_checkpoint(root, "a", other, fresh, dataloader=loader)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    assert not fresh.state
    with pytest.raises(Exception, match="because another rank" if first else "no state yet"):
        save_checkpoint(root, "b", other, dataloader=loader if first else Refusing())


def test_ranks_load_and_save_all_or_none(tmp_path: Path):
    run_ranks(one_rank_cannot, 2, str(tmp_path), tp=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class Counting(nn.Module):
    """Holds more than tensors."""

    def __init__(self, seen: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen = seen

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "mean": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"] if torch.equal(state["mean"], torch.full((2,), float(state["seen"]))) else -1


def extra_of(root: str, own: bool) -> list[Any]:
    """What a rank finds again at the degrees of the save, if it saves its rank and not 5."""
    save_checkpoint(root, "a", nn.Sequential(Counting(current_context().rank if own else 5)))
    other = nn.Sequential(Counting())
    load_checkpoint(root, "a", other)
    return [other[0].seen]


def test_modules_with_an_extra_state(tmp_path: Path, capsys, monkeypatch):
    """It comes back to each rank; at other degrees where it is the same on all; and is never lost in silence."""
    assert run_ranks(extra_of, 2, str(tmp_path / "own"), True, tp=1) == [[0], [1]]
    assert run_ranks(extra_of, 2, str(tmp_path / "same"), False, tp=1) == [[5], [5]]
    model = nn.Sequential(Counting())
    with pytest.raises(CheckpointError, match="holds another extra state of modules for each rank"):
        load_checkpoint(tmp_path / "own", "a", model)
    load_checkpoint(tmp_path / "own", "a", model, strict=False)
    assert model[0].seen == 0
    load_checkpoint(tmp_path / "same", "a", model)
    assert model[0].seen == 5
    reshard = partial(nxd_infer_here, capsys, monkeypatch, "ckpt", "reshard")
    assert reshard(tmp_path / "same", tmp_path / "one", "--tp", 1, "--dp", 1).status == 0
    model[0].seen = 0
    load_checkpoint(tmp_path / "one", "a", model)
    assert model[0].seen == 5
    assert "extra_state is left out" in reshard(tmp_path / "own", tmp_path / "two", "--tp", 1, "--dp", 1).out
    save_checkpoint(tmp_path, "without", nn.Sequential(nn.RMSNorm(2)))
    with pytest.raises(CheckpointError, match=r"holds no extra state of modules; .* pass strict=False"):
        load_checkpoint(tmp_path, "without", model)


class Tied(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("strict", [True, False])
def test_two_weights_that_are_one_here(tmp_path: Path, strict: bool):
    """Different ones cannot be; equal ones, and a checkpoint of the tied model, are loaded."""
    apart, tied = Tied(False), Tied(True)
    save_checkpoint(tmp_path, "apart", apart)
    before = tied.embed.weight.detach().clone()
    with pytest.raises(WeightMismatchError, match=r"'head.weight' and 'embed.weight' are one weight in this model"):
        load_checkpoint(tmp_path, "apart", tied, strict=strict)
    assert torch.equal(tied.embed.weight, before)
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    save_checkpoint(tmp_path, "equal", apart)
    load_checkpoint(tmp_path, "equal", tied, strict=strict)
    assert torch.equal(tied.head.weight, apart.head.weight)
    save_checkpoint(tmp_path, "tied", tied)
    load_checkpoint(tmp_path, "tied", Tied(True), strict=strict)


@pytest.mark.parametrize("names", [["embed.weight", "head.weight"], ["head.weight"]])
def test_a_tied_weight_of_another_shape(tmp_path: Path, names: list[str]):
    """Under the second of its names, which stands for the first one where only that is there."""
    apart, tied = Tied(False), Tied(True)
    apart.head = nn.Linear(3, 1, bias=False)
    if "embed.weight" not in names:
        del apart.embed
    save_checkpoint(tmp_path, "a", apart)
    before = tied.embed.weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(WeightMismatchError, match=r"of another shape: head.weight is \[1, 3\], wanted \[5, 3\]"):
            load_checkpoint(tmp_path, "a", tied, strict=strict)
        assert torch.equal(tied.embed.weight, before)


def test_a_dictionary_that_does_not_fit(tmp_path: Path):
    optimizer = AdamW(nn.Linear(2, 2).parameters())
    save_checkpoint(tmp_path, "a", nn.Linear(3, 3).state_dict(), optimizer.state_dict())
    with pytest.raises(CheckpointError, match=r"(?s)model, a dictionary, does not fit this one: .*size mismatch"):
        load_checkpoint(tmp_path, "a", nn.Linear(2, 2))
    other = nxd.initialize_parallel_optimizer(
        nxd.neuronx_distributed_config(), AdamW, nn.Linear(2, 2, bias=False).parameters()
    )
    with pytest.raises(CheckpointError, match="it does not fit this optimizer"):
        load_checkpoint(tmp_path, "a", optimizer=other)
