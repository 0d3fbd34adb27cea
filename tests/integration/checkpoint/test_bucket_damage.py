"""Buckets: damage is found before anything changes, and a job that is killed while it saves loses nothing."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from tests.integration.checkpoint.test_storage import KEYS
from tests.support.checkpoint.s3_server import s3_server
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, training
from tests.support.trainer.models import mlp, vectors

ROOT = "s3://models/job"


def saved(endpoint: str, options: dict) -> None:
    os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)
    model, optimizer = training(mlp, **options)
    model.run_train(**vectors())
    optimizer.step()
    save_checkpoint(ROOT, "a", model, optimizer, user_content=5)


def untouched(endpoint: str, options: dict, verify: bool) -> str:
    """This rank's error, for a model and an optimizer that must stay unchanged."""
    os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)
    model, optimizer = training(mlp, seed=4, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        assert load_checkpoint(ROOT, None, model, optimizer, verify=verify) == 5
    except CheckpointError as error:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), str(error)
        assert not optimizer.state
        return str(error)
    return "loaded"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_tensor_is_found_before_anything_changes(ranks: int):
    """Each file of a bucket in turn, whichever rank reads it; without verify= it is not looked for."""
    with s3_server() as (endpoint, objects, _):
        run_ranks(saved, ranks, endpoint, ZERO1, tp=1)
        files = sorted(name for name in objects if name.endswith(".safetensors"))
        assert len(files) == 1 + 2 * ranks
        for file in files:
            data = objects[file]
            objects[file] = data[:-1] + bytes([data[-1] ^ 1])
            told = run_ranks(untouched, ranks, endpoint, ZERO1, True, tp=1)
            assert sum(f"s3://{file} differs from its checksum" in text for text in told) == 1, told
            objects[file] = data
        assert run_ranks(untouched, ranks, endpoint, ZERO1, True, tp=1) == ["loaded"] * ranks


def test_a_file_of_several_parts(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Above 8 MB a file travels in parts, both ways."""
    with s3_server() as (endpoint, objects, _):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        model, other = nn.Linear(1600, 1600), nn.Linear(1600, 1600)
        save_checkpoint(ROOT, "a", model, user_content=1)
        assert len(objects["models/job/a.00000001/model.tp_rank_00.pp_rank_00.safetensors"]) > 8 << 20
        assert load_checkpoint(ROOT, model=other) == 1 and torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_whole_checkpoint_survives_a_failure_to_tidy_up(async_save: bool, monkeypatch: pytest.MonkeyPatch):
    """Removing an older one fails halfway: that is reported, and the new one exists."""
    with s3_server(kept={"models/job/a.00000001/manifest.json"}) as (endpoint, objects, _):
        for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
            monkeypatch.setenv(name, value)
        model, other = nn.Linear(3, 3), nn.Linear(3, 3)
        save_checkpoint(ROOT, "a", model, user_content="a")
        with pytest.raises(CheckpointError, match=r"a.00000001/manifest.json.*AccessDenied"):
            save_checkpoint(ROOT, "b", model, user_content="b", num_kept_ckpts=1, async_save=async_save)
            wait_for_save()
        assert "models/job/a.00000001/done" not in objects
        assert load_checkpoint(ROOT, model=other) == "b" and torch.equal(other.weight, model.weight)


# --- killed at any moment ---------------------------------------------------------------------------------


def save_until_killed(root: str, model: nn.Module, told: int) -> None:
    """Every other save beside the next; ``told`` gets the number of each that is known to be whole."""
    for step in range(10000):
        with torch.no_grad():
            model.weight.fill_(step)  # pyright: ignore[reportCallIssue]
        beside = step % 3 == 1
        save_checkpoint(root, f"step_{step % 5}", model, user_content=step, num_kept_ckpts=2, async_save=beside)
        if not beside:
            os.write(told, step.to_bytes(4, "little"))


def killed_in_a_bucket(endpoint: str, kills: int) -> list[tuple[int, int]]:
    """(last that was known to be whole, newest that is there) of each job."""
    assert current_context().world_size == 1
    os.environ.update(KEYS, AWS_ENDPOINT_URL=endpoint)
    draw, found, model = random.Random(11), [], nn.Linear(64, 64)
    for number in range(kills):
        root = f"s3://models/{number}"
        begun = time.monotonic()
        save_checkpoint(root, "first", model, user_content=-1)
        took = time.monotonic() - begun
        ready, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                save_until_killed(root, model, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        known = os.read(ready, 4)  # the first is whole
        time.sleep(draw.uniform(0, 5 * took))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        while more := os.read(ready, 4096):
            known += more
        os.close(ready)
        weights = nn.Linear(64, 64)
        step = load_checkpoint(root, model=weights)
        assert torch.equal(weights.weight, torch.full((64, 64), float(step)))
        save_checkpoint(root, "after", model, user_content="after", num_kept_ckpts=2)
        assert load_checkpoint(root) == "after" and load_checkpoint(root, f"step_{step % 5}") == step
        found.append((int.from_bytes(known[-4:], "little"), step))
    return found


def test_killed_at_random_moments_of_saving_into_a_bucket():
    """The last complete tag is never lost, tags that are saved anew included, and the next save tidies up."""
    with s3_server() as (endpoint, objects, _):
        (found,) = run_ranks(killed_in_a_bucket, 1, endpoint, 12)
        assert len(found) == 12 and all(newest >= known for known, newest in found), found
        folders = {tuple(key.split("/")[1:3]) for key in objects}
        assert len(folders) == 2 * 12  # "after" and the newest of each job
