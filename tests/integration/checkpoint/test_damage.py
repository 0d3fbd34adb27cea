"""A first start without a checkpoint; files that are missing, damaged, changed or there twice: each is named."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.comm.turns import in_turns
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from tests.support.checkpoint.older import with_sha256
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1, AdamW, trained_mlp, training
from tests.support.trainer.models import mlp, vectors


def test_the_first_start_of_a_job_that_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """The documented loop: load whatever there is, train, save; the second start goes on where the first was killed."""
    seen = []
    for _ in range(3):
        model, optimizer = training(mlp)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with caplog.at_level(logging.WARNING):
            user_content = load_checkpoint(tmp_path / "ckpts", **named)
        step = 0 if user_content is None else user_content["total_steps"]
        seen.append((step, scheduler.last_epoch, len(caplog.records)))
        model.run_train(**vectors())
        optimizer.step()
        scheduler.step()
        save_checkpoint(tmp_path / "ckpts", **named, user_content={"total_steps": step + 1})
    assert seen == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]
    assert "holds no checkpoint: nothing is loaded, training starts from the beginning" in caplog.text
    with pytest.raises(CheckpointError, match=r"no complete checkpoint with the tag 'step_9'; complete are: ''"):
        load_checkpoint(tmp_path / "ckpts", "step_9")


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def repeat_a_key(path: Path) -> None:
    path.write_text(path.read_text().replace('{"place"', '{"values": 1, "place"', 1))


MODEL, OPTIMIZER = "model.tp_rank_00.pp_rank_00.safetensors", "optim.dp_rank_00.tp_rank_00.pp_rank_00.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (MODEL, flip, f"a/{MODEL} differs from its checksum .*it was damaged or changed after it was saved"),
        (OPTIMIZER, flip, f"a/{OPTIMIZER} differs from its checksum"),
        ("rank_00000.safetensors", flip, "a/rank_00000.safetensors differs from its checksum"),
        ("rank_00000.json", flip, "a/rank_00000.json differs from its checksum"),
        ("rank_00000.json", repeat_a_key, "damaged: rank_00000.json has"),
        ("manifest.json", flip, "manifest.json differs from its checksum in 'done'"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
        (MODEL, Path.unlink, f"damaged: {MODEL} is missing; restore the files, or load another tag"),
        ("rank_00000.json", Path.unlink, r"of 1 ranks is damaged: rank_00000.json is missing; restore the files"),
        (MODEL, lambda path: path.write_bytes(path.read_bytes()[:-1]), f"{MODEL} has [0-9]+ bytes instead of [0-9]+"),
    ],
)
def test_damage_is_named(tmp_path: Path, file: str, damage: Callable[[Path], object], message: str):
    """With and without a tag: nothing older is taken for the newest checkpoint."""
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "older", model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer, num_kept_ckpts=None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    damage(tmp_path / "a" / file)
    for tag in ("a", None):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, tag, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    load_checkpoint(tmp_path, "older", model, optimizer)
    save_checkpoint(tmp_path, "a", model, optimizer)  # takes the place of the damaged one
    load_checkpoint(tmp_path, None, model, optimizer)


def test_an_older_checkpoint_that_is_damaged_stands_in_nobodys_way(tmp_path: Path):
    for tag in ("a", "b"):
        save_checkpoint(tmp_path, tag, nn.Linear(2, 2), user_content=tag)
    flip(tmp_path / "a" / "manifest.json")
    assert load_checkpoint(tmp_path) == "b"
    with pytest.raises(CheckpointError, match=r"a/manifest.json differs from its checksum"):
        load_checkpoint(tmp_path, "a")


def of_two_ranks(root: str) -> list[str]:
    """A first start, a save, and this rank's error for damage to each of the files in turn."""
    context = current_context()
    model, optimizer = training(mlp, **ZERO1)
    assert load_checkpoint(root, None, model, optimizer) is None
    save_checkpoint(root, "a", model, optimizer, user_content=1)
    assert load_checkpoint(root, None, model, optimizer) == 1
    told = []
    for file in sorted(Path(root, "a").glob("*.safetensors")):
        for _ in range(2):  # once damaged, then restored
            in_turns(context, 2, lambda file=file: flip(file) if context.rank == 0 else None, of_world=True)
            try:
                load_checkpoint(root, None, model, optimizer)
            except CheckpointError as error:
                told.append(f"{file.name}: {error}")
    return told


def test_each_file_is_verified_by_one_rank(tmp_path: Path):
    """Two ranks share the work; the one that finds the damage names the file, and none continues."""
    first, second = run_ranks(of_two_ranks, 2, str(tmp_path), tp=1)
    assert len(first) == len(second) == 5  # one model, two optimizers, two random states
    for one, other in zip(first, second, strict=True):
        file = one.partition(":")[0]
        named = [f"a/{file} differs from its checksum" in text for text in (one, other)]
        gave_up = ["gave up because another rank could not read" in text for text in (one, other)]
        assert sorted(named) == sorted(gave_up) == [False, True] and named != gave_up


def test_what_is_not_read_is_not_verified(tmp_path: Path):
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "a", model, optimizer, user_content=1)
    flip(tmp_path / "a" / OPTIMIZER)
    assert load_checkpoint(tmp_path, "a", model) == 1
    assert load_checkpoint(tmp_path, "a", model, optimizer, verify=False) == 1


def test_a_copy_beside_the_checkpoint_is_refused(tmp_path: Path):
    save_checkpoint(tmp_path, "a", nn.Linear(2, 2), user_content=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"a and b of .* are both checkpoint number 1 \(tag 'a'\): one is a copy"):
        load_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path / "b") == 1  # by its own name it is clear


def test_elements_that_two_ranks_claim_are_refused(tmp_path: Path):
    """A second rank that says it holds what the first one holds, in a checkpoint without checksums."""
    model, _ = trained_mlp()
    save_checkpoint(tmp_path, "a", model)
    folder = tmp_path / "a"
    shutil.copyfile(folder / "rank_00000.json", folder / "rank_00001.json")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["blake3"]
    manifest["world_size"] = 2
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "done").write_text("")
    with pytest.raises(CheckpointError, match=r"'unused': the checkpoint holds 6 of the 3 elements asked for"):
        load_checkpoint(tmp_path, "a", nn.ParameterDict({"unused": torch.zeros(3)}), strict=False)


def test_older_checkpoints_are_verified_by_their_sha256(tmp_path: Path):
    model, _ = trained_mlp()
    save_checkpoint(tmp_path, "a", model, user_content=7)
    folder = tmp_path / "a"
    names = with_sha256(folder)
    assert names == sorted(json.loads((folder / "manifest.json").read_text())["files"])
    assert load_checkpoint(tmp_path, "a", training(mlp, seed=3, optimizer_class=AdamW)[0]) == 7
    for name in names:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
        with pytest.raises(CheckpointError, match=rf"{name} differs from its checksum \(sha256 "):
            load_checkpoint(tmp_path, "a", training(mlp, seed=3, optimizer_class=AdamW)[0])
        (folder / name).write_bytes(data)


def test_a_checkpoint_of_the_first_version(tmp_path: Path):
    """Without checksums and the names of groups, with an empty ``done``."""
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "a", model, optimizer, user_content=7)
    path = tmp_path / "a" / "rank_00000.json"
    record = json.loads(path.read_text())
    del record["optimizer"]["group_names"], record["blake3"]
    path.write_text(json.dumps(record))
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    del manifest["blake3"]
    manifest["files"][path.name] = path.stat().st_size
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "a" / "done").write_text("")
    assert load_checkpoint(tmp_path, None, *training(mlp, seed=3, optimizer_class=AdamW)) == 7


@pytest.mark.parametrize("how", ["a bit", "unreadable"])
def test_a_damaged_mark_of_the_newest_is_no_missing_checkpoint(how: str, tmp_path: Path):
    """Neither the older one is loaded in its place, nor is the job's first start believed."""
    model, _ = trained_mlp()
    save_checkpoint(tmp_path, "old", model, user_content="old")
    save_checkpoint(tmp_path, "new", model, user_content="new")
    done = tmp_path / "new" / "done"
    if how == "a bit":
        data = bytearray(done.read_bytes())
        data[0] ^= 0x80
        done.write_bytes(data)
    else:
        done.unlink()
        done.mkdir()
    for tag in (None, "new"):
        with pytest.raises(CheckpointError, match="new"):
            load_checkpoint(tmp_path, tag)
    shutil.rmtree(tmp_path / "old")
    with pytest.raises(CheckpointError, match="new"):
        load_checkpoint(tmp_path)


# --- killed at any moment ---------------------------------------------------------------------------------


def save_until_killed(root: Path, model: nn.Module, ready: int) -> None:
    for step in range(10000):
        with torch.no_grad():
            model.weight.fill_(step)  # pyright: ignore[reportCallIssue]
        save_checkpoint(root, f"step_{step}", model, user_content=step, num_kept_ckpts=2, async_save=step % 2 == 1)
        if step == 0:
            os.write(ready, b".")
    os._exit(1)


def killed_at_random(folder: str) -> list[int]:
    """Twenty processes that save all the time, each killed in one of its first saves; what the newest holds."""
    root, draw, found = Path(folder), random.Random(5), []
    model = nn.Linear(512, 512)
    for number in range(20):
        path = root / str(number)
        begun = time.monotonic()
        save_checkpoint(path, "first", model, user_content=-1)
        took = time.monotonic() - begun
        ready, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            save_until_killed(path, model, theirs)
        os.close(theirs)
        assert os.read(ready, 1) == b"."
        os.close(ready)
        time.sleep(draw.uniform(0, 4 * min(took, 1.0)))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and has_checkpoint(path)
        weights = nn.Linear(512, 512)
        step = load_checkpoint(path, model=weights)
        assert torch.equal(weights.weight, torch.full((512, 512), float(step)))
        save_checkpoint(path, "after", model, user_content="after")
        assert load_checkpoint(path) == "after"
        assert not [name for name in os.listdir(path) if name.startswith(".")]  # the next save has tidied up
        found.append(step)
        shutil.rmtree(path)
    return found


def test_killed_at_twenty_random_moments(tmp_path: Path):
    """Nothing that was complete is ever lost, and what is there is whole."""
    (steps,) = run_ranks(killed_at_random, 1, str(tmp_path))
    assert len(steps) == 20 and min(steps) >= 0


# --- the documents ----------------------------------------------------------------------------------------


def test_the_documented_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The loop of docs/training.md, started three times; each start trains two epochs of three steps more."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[3] / "docs/training.md").read_text()
    (loop,) = re.findall(r"```python\n(loader = .*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
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


# --- how many ranks at a time -----------------------------------------------------------------------------


def writers_at_once(folder: str, num_workers: int) -> int:
    """The most ranks that were inside ``in_turns`` at the same time, as each rank has seen it."""
    context, seen = current_context(), []

    def action() -> None:
        mine = Path(folder) / str(context.rank)
        mine.touch()
        seen.append(len(os.listdir(folder)))
        mine.unlink()

    for _ in range(20):
        in_turns(context, num_workers, action, of_world=True)
    return max(seen)


def test_no_more_ranks_than_workers(tmp_path: Path):
    """``num_workers`` ranks write, and read, at a time."""
    assert run_ranks(writers_at_once, 2, str(tmp_path), 1) == [1, 1]
