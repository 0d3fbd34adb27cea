"""Training goes on bit for bit on one rank; what does not fit is refused before anything changes."""

from __future__ import annotations

import copy
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
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.errors import CheckpointError, WeightMismatchError
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
    """The loop of docs/training.md, started three times; each start trains two epochs of three steps more."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs/training.md").read_text()
    (loop,) = re.findall(r"```python\n(loader = .*?)```", text, re.DOTALL)
    for start in range(3):
        model, optimizer = training(mlp)
        batch = vectors(rows=12)
        dataset = [{name: value[i] for name, value in batch.items()} for i in range(12)]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "dataset": dataset, "nxd": nxd}
        names["epochs"] = 2 * start + 2
        exec(compile(loop.replace("% 100", "% 2"), "docs/training.md", "exec"), names)
        wait_for_save()
        assert names["step"] == scheduler.last_epoch == 6 * start + 6
    assert sorted(os.listdir("ckpts")) == ["step_14", "step_16", "step_18"]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert "holds no checkpoint: nothing is loaded, training starts from the beginning" in warning


def test_a_group_that_cannot_be_saved_is_named(tmp_path: Path):
    """Silently omitted, it would be missing from the resumed job."""
    config = nxd.neuronx_distributed_config()
    group = {"params": [nn.Parameter(torch.ones(2))], "note": object()}
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, [group], lr=1e-3)
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]\['note'\] is a object"):
        save_checkpoint(tmp_path, "a", optimizer=optimizer)


def test_what_was_not_saved_or_refuses_its_state_is_told_before_anything_changes(tmp_path: Path):
    """Also the position in another dataset, and the state of another kind of schedule."""
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
