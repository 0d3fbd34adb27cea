"""Training goes on bit for bit on one rank, an optimizer as it was; what does not fit is refused before a change."""

from __future__ import annotations

import copy
import gc
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.checkpoint import reshard_checkpoint
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.reshard import Resharding
from nxd_infer.errors import CheckpointError, NotInitializedError, WeightMismatchError
from nxd_infer.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.trainer.data import ResumableLoader
from tests.support.checkpoint.stories import (
    masters_are_the_weights,
    others_are_refused,
    schedules_go_on,
    sequential,
    stepped,
)
from tests.support.trainer.jobs import training
from tests.support.trainer.models import mlp, vectors


@pytest.mark.parametrize("story", [schedules_go_on, masters_are_the_weights, others_are_refused])
def test_on_one_rank(tmp_path: Path, story: Callable[[str, bool], None]):
    story(str(tmp_path), False)


def test_the_documented_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The loop of docs/checkpoints.md, started three times; each start trains two epochs of three steps more."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs/checkpoints.md").read_text()
    (loop,) = re.findall(r"```python\n(loader = .*?)```", text, re.DOTALL)
    for start in range(3):
        model, optimizer = training(mlp)
        batch = vectors(rows=12)
        dataset = [{name: value[i] for name, value in batch.items()} for i in range(12)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataset": dataset, "nxd": nxd}
        names["epochs"] = 2 * start + 2
        exec(compile(loop.replace("% 100", "% 2"), "docs/checkpoints.md", "exec"), names)
        wait_for_save()
        assert names["step"] == scheduler.last_epoch == 6 * start + 6
    assert sorted(os.listdir("ckpts")) == ["step_14", "step_16", "step_18"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "holds no checkpoint yet: nothing is loaded, the model keeps the weights that it has" in warning


def test_a_group_that_cannot_be_saved_is_named(tmp_path: Path):
    """Silently omitted, it would be missing from the resumed job."""
    config = nxd.neuronx_distributed_config()
    group = {"params": [nn.Parameter(torch.ones(2))], "note": object()}
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, [group], lr=1e-3)
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['note'\] is a object"):
        save_checkpoint(tmp_path, "a", optimizer=optimizer)


def test_what_was_not_saved_or_refuses_its_state_is_told_before_anything_changes(tmp_path: Path):
    model, optimizer = stepped()
    save_checkpoint(tmp_path, "bare", model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(tmp_path, "full", model, optimizer, schedule, dataloader=ResumableLoader([1, 2, 3]))
    model, optimizer = training(mlp, seed=3)
    before = copy.deepcopy(model.state_dict())
    loader = ResumableLoader([1, 2])
    wanted: list[tuple[str, dict[str, Any], str]] = [
        ("bare", {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}, "holds no scheduler"),
        ("bare", {"dataloader": loader}, "holds no position in the data"),
        ("full", {"dataloader": loader}, "^the position in the data is from a loader with length 3"),
        ("full", {"scheduler": sequential(optimizer)}, "scheduler does not fit this one: '_schedulers'"),
    ]
    for tag, parts, message in wanted:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, tag, model, optimizer, **parts)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert not optimizer.state


class Tied(nn.Module):
    def __init__(self, tied: bool):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight


@pytest.mark.parametrize("strict", [True, False])
def test_two_weights_that_are_one_here(tmp_path: Path, strict: bool):
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


AdamW = torch.optim.AdamW


def optimized(model: nn.Module, optimizer_class: type[torch.optim.Optimizer] = AdamW) -> tuple[nn.Module, NxDOptimizer]:
    optimizer = NxDOptimizer(model.named_parameters(), optimizer_class)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: NxDOptimizer) -> None:
    x = torch.linspace(-1, 1, 8, dtype=next(model.parameters()).dtype).view(2, 4)
    found = model(x)
    torch.cat(found if isinstance(found, tuple) else (found,), dim=-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def states(optimizer: NxDOptimizer) -> list[dict[str, Any]]:
    return list(optimizer.optimizer.state.values())


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def test_nothing_keeps_the_files_open(tmp_path: Path):
    """A mapped file stays on the disk when its checkpoint is removed, and on NFS its folder cannot be removed."""
    model, optimizer = optimized(linears())
    save_checkpoint(tmp_path / "ours", "a", model, optimizer, user_content={"seen": torch.arange(5)})
    plain = torch.optim.SGD(model.parameters(), momentum=0.5)
    save_checkpoint(tmp_path / "dictionary", "a", model.state_dict(), plain.state_dict())
    content = load_checkpoint(tmp_path / "ours", "a", model, optimizer)
    load_checkpoint(tmp_path / "dictionary", "a", model, plain)
    gc.collect()
    assert content["seen"].tolist() == list(range(5)) and len(states(optimizer)) == 4
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_an_optimizer_that_is_not_there_yet(tmp_path: Path):
    model, optimizer = optimized(linears())
    save_checkpoint(tmp_path, "a", model, optimizer)
    lazy = NxDOptimizer(model.named_parameters(), AdamW, lazy_init=True)
    for call in (load_checkpoint, save_checkpoint):
        with pytest.raises(NotInitializedError, match=r"lazy_init=True: call init_zero\(\) before"):
            call(tmp_path, "a", model, lazy)
    lazy.init_zero()
    load_checkpoint(tmp_path, "a", model, lazy)
    assert len(states(lazy)) == 4


def test_a_layer_that_is_fused_now_and_was_not(tmp_path: Path):

    def build(fused: bool) -> nn.Module:
        torch.manual_seed(3)
        return GQAQKVColumnParallelLinear(4, [4, 2], bias=True, gather_output=False, fuse_qkv=fused)

    for fused in (True, False):
        model, optimizer = optimized(build(fused))
        save_checkpoint(tmp_path, f"{fused}", model, optimizer)
        other, fresh = optimized(build(not fused))
        load_checkpoint(tmp_path, f"{fused}", other, fresh)
        for one in ((model, optimizer), (other, fresh)):
            step(*one)
        x = torch.ones(1, 4)
        torch.testing.assert_close(model(x), other(x))  # a fused product may round otherwise


class Counting(torch.optim.Optimizer):
    """Counts in a tensor of shape (1,), and sums in float32 whatever the dtype of the weights."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("step", torch.zeros(1)).add_(1)
                state.setdefault("sum", torch.zeros_like(param, dtype=torch.float32)).add_(param.grad.float() * 1.001)
                param -= (group["lr"] * state["sum"]).to(param.dtype)


def test_a_count_of_one_element_is_not_one_per_element(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also in pieces of one element, as sharding over three ranks makes of the bias."""
    model, optimizer = optimized(nn.Linear(4, 3), Counting)
    save_checkpoint(tmp_path / "a", "a", model, optimizer)
    monkeypatch.setattr(Resharding, "_is_zero1", lambda self: True)
    reshard_checkpoint(tmp_path / "a", tmp_path / "b", tp=1, dp=3)
    for root in (tmp_path / "a", tmp_path / "b"):
        load_checkpoint(root, "a", *optimized(nn.Linear(4, 3), Counting))
        other, fresh = optimized(nn.Linear(4, 3), Counting)
        load_checkpoint(root, "a", other, fresh)
        assert [state["step"].tolist() for state in states(fresh)] == [[1.0], [1.0]]
        for mine, theirs in zip(states(optimizer), states(fresh), strict=True):
            assert torch.equal(mine["sum"], theirs["sum"])


def test_state_that_is_wider_than_its_weights(tmp_path: Path):
    """As it was saved; if the weights have another dtype now, it is what PyTorch makes of it."""

    def build(dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, NxDOptimizer]:
        torch.manual_seed(0)
        return optimized(nn.Linear(4, 3, dtype=dtype), Counting)

    model, optimizer = build()
    save_checkpoint(tmp_path / "a", "a", model, optimizer)
    reshard_checkpoint(tmp_path / "a", tmp_path / "b", tp=1)
    for root in (tmp_path / "a", tmp_path / "b"):
        other, fresh = build()
        load_checkpoint(root, "a", other, fresh)
        for mine, theirs in zip(states(optimizer), states(fresh), strict=True):
            assert theirs["sum"].dtype == torch.float32 and torch.equal(mine["sum"], theirs["sum"])
    wide, optimizer = optimized(nn.Linear(4, 3))
    save_checkpoint(tmp_path / "c", "c", wide, optimizer)
    narrow, fresh = optimized(nn.Linear(4, 3, dtype=torch.bfloat16))
    load_checkpoint(tmp_path / "c", "c", narrow, fresh)
    assert {state["exp_avg"].dtype for state in states(fresh)} == {torch.bfloat16}
