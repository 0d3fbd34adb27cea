"""Checkpoints in a bucket: s3fs against an HTTP server that speaks the few calls."""

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
from nxd_infer.checkpoint.storage import RemoteStorage
from nxd_infer.errors import CheckpointError
from tests.support.checkpoint.s3_server import s3_server
from tests.support.e2e.command import here
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, train, training
from tests.support.trainer.models import MLP, mlp, vectors

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}


KEPT = "models/kept.00000001/manifest.json"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, dict[str, bytes], list[str]]]:
    with s3_server({KEPT}) as (endpoint, objects, calls):
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
    with pytest.raises(CheckpointError, match="the tag 'x'; complete are: 'step_2', 'step_3'"):
        load_checkpoint(root, "x")


def test_folders_of_others_stay_in_a_bucket(bucket):
    """A date has eight digits, as the number that a killed save leaves in its folder's name."""
    _, objects, _ = bucket
    foreign = "models/backup.20261121/weights.bin"
    left = "models/step_9.00000009/rank_00000.safetensors"
    objects[foreign], objects[left] = b"precious", b"half"
    save_checkpoint("s3://models", "a", MLP())
    assert objects[foreign] == b"precious" and left not in objects


def reached(endpoint: str) -> None:
    os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)


def saved(endpoint: str) -> None:
    reached(endpoint)
    model, optimizer = training(mlp, **ZERO1)
    train(model, optimizer, vectors())
    save_checkpoint("s3://models/job", "a", model, optimizer, user_content=5)
    other = training(mlp, seed=4, **ZERO1)
    assert load_checkpoint("s3://models/job", None, *other) == 5
    wanted = model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in other[0].state_dict().items())


def untouched(endpoint: str) -> str:
    reached(endpoint)
    model, optimizer = training(mlp, seed=4, **ZERO1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_checkpoint("s3://models/job", None, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    return str(raised.value)


def test_ranks_and_tools_in_a_bucket(bucket, tmp_path: Path):
    """Damage is found by one rank before anything changes on any."""
    endpoint, objects, _ = bucket
    run_ranks(saved, 2, endpoint, tp=2)
    run = partial(here, "ckpt")
    assert "tp 2" in run("inspect", "s3://models/job").out
    assert run("reshard", "s3://models/job", tmp_path / "one", "--tp", 1).status == 0
    assert run("reshard", tmp_path / "one", "s3://models/two", "--tp", 2).status == 0
    done = run("diff", "s3://models/job", "s3://models/two")
    assert done.status == 0 and " 0 differ" in done.out
    (file,) = (name for name in objects if "job/" in name and name.endswith("model.tp_rank_01.pp_rank_00.safetensors"))
    objects[file] = objects[file][:-1] + bytes([objects[file][-1] ^ 1])
    told = run_ranks(untouched, 2, endpoint, tp=2)
    assert sum(f"s3://{file} differs from its checksum" in text for text in told) == 1, told


def test_a_whole_checkpoint_survives_a_failure_to_tidy_up(bucket):
    """Removing an older one fails halfway: that is reported, and the new one exists."""
    _, objects, _ = bucket
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    save_checkpoint("s3://models", "kept", model, user_content="a")
    save_checkpoint("s3://models", "b", model, user_content="b", num_kept_ckpts=1, async_save=True)
    with pytest.raises(CheckpointError, match=f"{KEPT}.*AccessDenied"):
        wait_for_save()
    assert KEPT in objects and "models/kept.00000001/done" not in objects
    assert load_checkpoint("s3://models", model=other) == "b" and torch.equal(other.weight, model.weight)


LAST_SAVES = (
    "import torch; from nxd_infer.checkpoint.api import save_checkpoint; "
    "save_checkpoint('s3://models', 'last', torch.nn.Linear(300, 300), user_content=1, async_save=True)",
    # What another rank than the first does, which meets the store for the first time when its process ends.
    "import torch; from nxd_infer.checkpoint.async_save import outstanding; "
    "from nxd_infer.checkpoint.contents import Content; from nxd_infer.checkpoint.save import write_content; "
    "from nxd_infer.checkpoint.storage import storage_of; "
    "storage, content = storage_of('s3://models'), Content({'a': {'b': torch.zeros(3)}}, {}); "
    "outstanding.start(storage, 'last', 1, lambda: write_content(storage, 'last', 1, content))",
)


@pytest.mark.parametrize("code", LAST_SAVES, ids=["first", "other"])
def test_the_process_ends_when_its_save_is_whole(code: str, bucket):
    """A store finds addresses in threads of its own, which an interpreter that ends would refuse."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and not done.stderr, done.stderr
    _, objects, _ = bucket
    assert "models/last.00000001/done" in objects or "models/last/rank_00001.json" in objects


def test_a_store_that_is_not_there_is_no_empty_folder(bucket, monkeypatch: pytest.MonkeyPatch):
    """A job that resumes from a misspelled one would begin anew."""
    with pytest.raises(CheckpointError, match="s3://missing/run: NoSuchBucket"):
        load_checkpoint("s3://missing/run")
    with pytest.raises(CheckpointError, match=r"s3://forbidden/x: Forbidden"):
        RemoteStorage("s3://forbidden").read("x")
    with pytest.raises(FileNotFoundError, match="s3://models/x does not exist"):
        RemoteStorage("s3://models").read("x")
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CheckpointError, match="s3://models"):
        save_checkpoint("s3://models", "a", nn.Linear(2, 2))
