"""Folders, names and what stays of a job; its learning rate; where its ranks come from."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nxd_infer.checkpoint.api import save_checkpoint
from nxd_infer.checkpoint.folder import complete_checkpoints
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import RankFailedError, RecipeError
from nxd_infer.processes.ranks import _raise_first_failure
from nxd_infer.recipes.experiment import Keeper, Patience, checkpoint_name, log_dir_of, saves, validates
from nxd_infer.recipes.launch import check_world, first_host, is_a_rank, variables_of_slurm
from nxd_infer.recipes.optim import OPTIMIZERS, optimizer_arguments, parameter_groups, rate_of
from nxd_infer.recipes.recipe import check
from nxd_infer.recipes.schema import RATES, CheckpointCallback, EarlyStopping, ExpManager, Optim, Sched, Trainer
from nxd_infer.recipes.yaml_text import parse_yaml
from tests.support.e2e.command import here, refused


def test_a_job_has_a_version_of_its_own_or_goes_on(tmp_path):
    manager = ExpManager(exp_dir=str(tmp_path), name="x")
    assert log_dir_of(manager) == tmp_path / "x/version_0"
    for name in ("version_2", "version_10", "prepared"):
        (tmp_path / "x" / name).mkdir(parents=True)
    assert log_dir_of(manager).name == "version_11"
    assert log_dir_of(ExpManager(exp_dir=str(tmp_path), name="x", resume_if_exists=True)).name == "version_10"
    assert log_dir_of(ExpManager(exp_dir=str(tmp_path), name="x", version="mine")).name == "mine"
    assert log_dir_of(ExpManager(explicit_log_dir=str(tmp_path / "y"))) == tmp_path / "y"
    dated = log_dir_of(ExpManager(exp_dir=str(tmp_path), name="x", use_datetime_version=True))
    assert dated.name.count("-") == 4


def test_a_checkpoint_is_named_by_its_numbers():
    numbers = {"step": 7, "consumed_samples": 56, "val_loss": 1.256}
    name = checkpoint_name(CheckpointCallback(filename="x--{step}-{consumed_samples}"), numbers)
    assert name == "x--step=7-consumed_samples=56"
    assert checkpoint_name(CheckpointCallback(filename="{val_loss:.2f}"), numbers) == "val_loss=1.26"
    assert checkpoint_name(CheckpointCallback(filename="{step}", auto_insert_metric_name=False), numbers) == "7"
    with pytest.raises(RecipeError, match="filename"):
        checkpoint_name(CheckpointCallback(filename="{step:zz}"), numbers)


def test_the_best_checkpoints_stay(tmp_path):
    scores = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 5.0, "e": math.nan}
    for options, kept in (
        ({"save_top_k": 2, "mode": "min"}, ["b", "c"]),
        ({"save_top_k": 2, "mode": "max"}, ["a", "d"]),
        ({"save_top_k": 1, "mode": "min", "save_last": True}, ["b", "e"]),
        ({"save_top_k": -1, "mode": "min"}, ["a", "b", "c", "d", "e"]),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        callback = CheckpointCallback(monitor="val_loss", **options)
        keeper = Keeper(callback, folder)
        for tag, score in scores.items():
            keeper.add(tag, score)
            save_checkpoint(keeper.folder, tag, model={"x": torch.ones(1)})
            keeper = Keeper(callback, folder)  # as a resumed job, which reads the scores
            keeper.prune()
        assert sorted(one.tag for one in complete_checkpoints(storage_of(keeper.folder))) == kept, options
    assert set(json.loads((folder / "scores.json").read_text())) == set("abcde")
    assert list(folder.glob(".*")) == []  # written whole


def test_checkpoints_and_validations_are_due_as_was_asked_for():
    """By steps, epochs or time, or by several of them; three steps are an epoch."""

    def due(decide: Callable[[int, int | None], bool]) -> list[int]:
        return [step for step in range(1, 13) if decide(step, None if step % 3 else step // 3)]

    def saved(late: tuple[int, ...] = (), **options: Any) -> list[int]:
        callback = CheckpointCallback(**options)
        return due(lambda step, ended: saves(callback, step, ended, step in late, step in (5, 10)))

    assert saved() == [5, 10]  # with the validations
    assert saved(every_n_train_steps=4) == [4, 8, 12]
    assert saved(every_n_epochs=2) == [6, 12]
    assert saved(every_n_epochs=2, every_n_train_steps=4) == [4, 6, 8, 12]
    assert saved(late=(7,), train_time_interval=60.0) == [7]

    def validated(last: int | None = None, **options: Any) -> list[int]:
        trainer = Trainer(**options)
        return due(lambda step, ended: validates(trainer, step, 3, ended, step == last))

    assert validated() == validated(last=12) == []
    assert validated(last=12, val_check_interval=5.0) == [5, 10, 12]
    assert validated(val_check_interval=5.0) == [5, 10]
    assert validated(val_check_interval=1.0) == [3, 6, 9, 12]
    assert validated(val_check_interval=1) == list(range(1, 13))  # as in Lightning, where 1.0 is an epoch
    assert validated(val_check_interval=0.25) == list(range(1, 13))
    assert validated(check_val_every_n_epoch=2) == [6, 12]
    assert validated(check_val_every_n_epoch=3, val_check_interval=5.0) == [5, 9, 10]


def test_patience_ends_when_a_metric_stands_still():
    patience = Patience(EarlyStopping(patience=2, min_delta=0.1))
    assert [patience.stops(value) for value in (3.0, 2.0, 1.95, 1.99)] == [False, False, False, True]
    assert Patience(EarlyStopping()).stops(math.nan)
    rising = Patience(EarlyStopping(mode="max", patience=1, min_delta=0.0))
    assert [rising.stops(value) for value in (1.0, 2.0, 2.0)] == [False, False, True]


def test_rates_rise_hold_and_fall():
    linear = rate_of(Sched(warmup_steps=4, min_lr=0.1, constant_steps=2), lr=1.0, steps=16)
    assert [round(linear(step), 3) for step in (0, 3, 4, 9, 14, 15, 99)] == [0.0, 0.75, 1.0, 0.55, 0.1, 0.1, 0.1]
    nemo = rate_of(Sched(name="CosineAnnealing", warmup_steps=4), lr=1.0, steps=16)
    assert [round(nemo(step), 3) for step in (0, 3, 4)] == [0.2, 0.8, 1.0]
    cosine = rate_of(Sched(name="CosineAnnealing", max_steps=10), lr=2.0, steps=99)
    assert cosine(0) == 1.0 and cosine(5) == pytest.approx(0.5) and cosine(10) == pytest.approx(0)
    hold = rate_of(Sched(name="WarmupHoldPolicy", warmup_ratio=0.5), lr=1.0, steps=4)
    assert [hold(step) for step in range(4)] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    for name in RATES:
        assert 0 <= rate_of(Sched(name=name), 1.0, 10)(5) <= 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_its_keys(name):
    given = optimizer_arguments(Optim(name=name, lr=0.5, weight_decay=0.25, betas=[0.1, 0.2], eps=0.125, momentum=0.75))
    (group,) = OPTIMIZERS[name]([torch.zeros(1, requires_grad=True)], **given).param_groups
    found = {key: group[key] for key in ("lr", "weight_decay", "eps", "momentum", "betas") if key in group}
    wanted = {"lr": 0.5, "weight_decay": 0.25, "eps": 0.125, "momentum": 0.75, "betas": (0.1, 0.2)}
    assert found == {key: wanted[key] for key in found}


def test_norms_and_biases_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    decayed, kept = parameter_groups(model, Optim(weight_decay=0.1), decay_norms=False)
    assert [len(decayed["params"]), len(kept["params"]), kept["weight_decay"]] == [1, 3, 0.0]
    (every,) = parameter_groups(model, Optim(weight_decay=0.1), decay_norms=True)
    assert len(every["params"]) == 4


def test_ranks_come_from_slurm_or_torchrun():
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_NODELIST": "trn[003-007,9],head",
        "SLURM_JOB_ID": "123",
    }
    found = variables_of_slurm(slurm)
    assert found == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "trn003", "MASTER_PORT": "29523",
    }  # fmt: skip
    assert is_a_rank(found) and not is_a_rank(slurm)
    assert variables_of_slurm({**slurm, "SLURM_NTASKS": "1"}) == variables_of_slurm({}) == {}
    assert variables_of_slurm({**slurm, "RANK": "0", "WORLD_SIZE": "2"}) == {}  # torchrun inside a job
    assert [first_host(nodes) for nodes in ("a,b", "node12", "n[1,3]")] == ["a", "node12", "n1"]
    text = "trainer: {devices: 2, max_steps: 1}\ndata: {train_dir: x, global_batch_size: 2}\n"
    loaded = check(parse_yaml(text, "r.yaml"))
    check_world(loaded, {"WORLD_SIZE": "2"})
    with pytest.raises(RecipeError, match=r"r\.yaml:1: trainer\.devices x .* is not the 4 processes"):
        check_world(loaded, {"WORLD_SIZE": "4"})


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_logger_whose_package_is_missing_is_one_sentence(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(
        f"trainer: {{max_steps: 1}}\ndata: {{train_dir: x}}\nexp_manager: {{create_{package}_logger: true}}\n"
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}\nprecision: {type: fp32}\n"
    )
    told = f"r.yaml:3: exp_manager.create_{package}_logger: needs the package {package}: pip install {package}, or set"
    refused(here("train", "r.yaml"), told)
    plan = here("train", "r.yaml", "--check")
    assert plan.status == 0 and f"cannot be trained here: {told}" in plan.out
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_of_ranks_that_have_failed_at_once_the_one_that_was_killed_is_named(tmp_path):
    """The others may have failed because of it."""
    ranks = [SimpleNamespace(returncode=code, explain=lambda code=code: f"has {code}") for code in (0, 1, -9)]
    (tmp_path / "log").write_text("what they said\n")
    with pytest.raises(RankFailedError, match="rank 2 has -9"):
        _raise_first_failure(ranks, tmp_path / "log")
