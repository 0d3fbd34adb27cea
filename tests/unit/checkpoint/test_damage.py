"""Files that are missing, damaged, changed or there twice: each is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.errors import CheckpointError
from tests.support.checkpoint.older import with_sha256, without_checksums
from tests.support.trainer.jobs import AdamW, trained_mlp, training
from tests.support.trainer.models import mlp


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
        ("rank_00000.safetensors", flip, "a/rank_00000.safetensors differs from its checksum"),
        ("rank_00000.json", flip, "a/rank_00000.json differs from its checksum"),
        ("rank_00000.json", repeat_a_key, "damaged: rank_00000.json has"),
        ("manifest.json", flip, "manifest.json differs from its checksum in 'done'"),
        ("manifest.json", Path.unlink, "manifest.json is missing"),
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
    without_checksums(folder, world_size=2)
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
    without_checksums(tmp_path / "a")
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
