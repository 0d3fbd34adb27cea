"""Checkpoints in a bucket: boto3 against an HTTP server that speaks the few calls."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.storage import LocalStorage, S3Storage, storage_of
from nxd_infer.errors import CheckpointError
from tests.e2e.command import nxd_infer_here
from tests.ranks import run_ranks
from tests.trainer.jobs import ZERO1, training
from tests.trainer.models import MLP, mlp, vectors
from tests.trainer.s3_server import s3_server

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    with s3_server() as (endpoint, objects, calls):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        yield endpoint, objects, calls


def test_tags_in_a_bucket(bucket):
    _, objects, calls = bucket
    root = "s3://models/run/1"
    assert not has_checkpoint(root) and load_checkpoint(root) is None
    model = MLP()
    for step in range(4):
        with torch.no_grad():
            model.unused.fill_(step)
        save_checkpoint(root, f"step_{step}", model, user_content=step, num_kept_ckpts=2, async_save=step == 1)
    wait_for_save()
    folders = sorted({key.split("/")[3] for key in objects})
    assert folders == ["step_2.00000003", "step_3.00000004"]
    written = [call for call in calls if "step_3" in call]
    assert written[-1] == "PUT models/run/1/step_3.00000004/done"
    assert next(call for call in calls if call.startswith("DELETE")).endswith("/done")
    other = MLP()
    assert load_checkpoint(root, model=other) == 3 and torch.equal(other.unused, model.unused)
    assert load_checkpoint(root, "step_2", model=other) == 2 and torch.equal(other.unused, torch.full((3,), 2.0))
    save_checkpoint(root, "step_2", model, user_content="again")
    assert load_checkpoint(root, "step_2") == "again" and len({key.split("/")[3] for key in objects}) == 2
    with pytest.raises(CheckpointError, match="the tag 'x'; complete are: 'step_3', 'step_2'"):
        load_checkpoint(root, "x")


def test_folders_of_others_stay_in_a_bucket(bucket):
    """A date has eight digits, as the number that a killed save leaves in its folder's name."""
    _, objects, _ = bucket
    foreign = "models/backup.20261121/weights.bin"
    left = "models/step_9.00000009/rank_00000.safetensors"
    objects[foreign], objects[left] = b"precious", b"half"
    save_checkpoint("s3://models", "a", MLP())
    assert objects[foreign] == b"precious" and left not in objects


def test_damage_in_a_bucket(bucket):
    _, objects, _ = bucket
    model = MLP()
    for tag in ("older", "a"):
        save_checkpoint("s3://models", tag, model, user_content=tag)
    name = "models/a.00000002/model.tp_rank_00.pp_rank_00.safetensors"
    data = objects[name]
    objects[name] = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CheckpointError, match=r"s3://models/a.00000002/model.*differs from its checksum"):
        load_checkpoint("s3://models", model=model)
    objects[name] = data[:-1]
    with pytest.raises(CheckpointError, match=r"model.tp_rank_00.pp_rank_00.safetensors has \d+ bytes instead"):
        load_checkpoint("s3://models", model=model)
    del objects["models/a.00000002/done"]  # as a killed job leaves it
    assert load_checkpoint("s3://models", model=model) == "older"
    save_checkpoint("s3://models", "b", model)
    assert {key.split("/")[1] for key in objects} == {"older.00000001", "b.00000003"}  # the next save has tidied up
    with pytest.raises(CheckpointError, match=r"s3://forbidden/x.*AccessDenied"):
        S3Storage("s3://forbidden").read("x")
    with pytest.raises(FileNotFoundError, match="s3://models/x does not exist"):
        S3Storage("s3://models").read("x")


def of_two_ranks(endpoint: str) -> None:
    os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)
    try:
        model, optimizer = training(mlp, **ZERO1)
        model.run_train(**vectors())
        optimizer.step()
        save_checkpoint("s3://models/job", "a", model, optimizer, user_content=5)
        other = training(mlp, seed=4, **ZERO1)
        assert load_checkpoint("s3://models/job", None, *other) == 5
        wanted = model.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in other[0].state_dict().items())
    finally:
        for name in (*KEYS, "AWS_ENDPOINT_URL"):
            del os.environ[name]


def test_ranks_and_tools_in_a_bucket(bucket, tmp_path: Path, capsys, monkeypatch):
    endpoint, _, _ = bucket
    run_ranks(of_two_ranks, 2, endpoint, tp=2)
    run = partial(nxd_infer_here, capsys, monkeypatch, "ckpt")
    assert "tp 2" in run("inspect", "s3://models/job").out
    assert run("reshard", "s3://models/job", tmp_path / "one", "--tp", 1).status == 0
    assert run("reshard", tmp_path / "one", "s3://models/two", "--tp", 2).status == 0
    done = run("diff", "s3://models/job", "s3://models/two")
    assert done.status == 0 and " 0 differ" in done.out


def test_the_process_ends_when_its_save_is_whole(bucket):
    """Uploading needs no thread of its own, which an interpreter that ends would refuse."""
    code = (
        "import torch; from nxd_infer.checkpoint.api import save_checkpoint; "
        "save_checkpoint('s3://models', 'last', torch.nn.Linear(300, 300), user_content=1, async_save=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert load_checkpoint("s3://models", model=nn.Linear(300, 300)) == 1


@pytest.mark.check
def test_what_a_path_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(storage_of(tmp_path), LocalStorage)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    for url in ("s3://bucket/a/b/", Path("s3://bucket/a/b")):
        storage = storage_of(url)
        assert isinstance(storage, S3Storage) and storage.where("c") == "s3://bucket/a/b/c"
    with pytest.raises(CheckpointError, match="names no bucket"):
        storage_of("s3://")


def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="s3://models"):
        save_checkpoint("s3://models", "a", nn.Linear(2, 2))
