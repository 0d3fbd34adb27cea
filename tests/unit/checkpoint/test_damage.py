"""Files that are missing, damaged, there twice or made by hand are named; and which checkpoint is the newest."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import CheckpointError
from tests.support.checkpoint.resigned import resign
from tests.support.trainer.jobs import trained_mlp, training
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


def test_what_is_not_read_is_not_verified(tmp_path: Path):
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "a", model, optimizer, user_content=1)
    flip(tmp_path / "a" / OPTIMIZER)
    assert load_checkpoint(tmp_path, "a", model) == 1
    assert load_checkpoint(tmp_path, "a", model, optimizer, verify=False) == 1


def test_a_copy_beside_the_checkpoint_is_the_same_checkpoint(tmp_path: Path):
    save_checkpoint(tmp_path, "a", nn.Linear(2, 2), user_content=1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert load_checkpoint(tmp_path) == load_checkpoint(tmp_path, "a") == load_checkpoint(tmp_path / "b") == 1


def test_elements_that_two_ranks_claim_are_refused(tmp_path: Path):
    model, _ = trained_mlp()
    save_checkpoint(tmp_path, "a", model)
    folder = tmp_path / "a"
    shutil.copyfile(folder / "rank_00000.json", folder / "rank_00001.json")
    resign(folder, world_size=2)
    with pytest.raises(CheckpointError, match=r"'unused': the checkpoint holds 6 of the 3 elements asked for"):
        load_checkpoint(tmp_path, "a", nn.ParameterDict({"unused": torch.zeros(3)}), strict=False)


RECORD = "rank_00000.json"

Change = Callable[[str], str]


def by_hand(root: Path, change: Change) -> None:
    """A checkpoint with a changed record, whose checksum is right."""
    save_checkpoint(root, "a", *trained_mlp(), user_content=1)
    folder = root / "a"
    (folder / RECORD).write_text(change((folder / RECORD).read_text()))
    resign(folder)


def put(*path: str, value: Any = None, drop: bool = False) -> Change:
    """A record with another value at a place, or without it."""

    def change(text: str) -> str:
        inner = record = json.loads(text)
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        if drop:
            del inner[path[-1]]
        return json.dumps(record)

    return change


PIECE = ("model", "pieces", "unused")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: f"[{text}]", "rank_00000.json is damaged"),
        (lambda text: f'{text[:-1]}, "x": {"[" * 100_000}{"]" * 100_000}}}', "nested too deeply"),
        (put("place", drop=True), "rank_00000.json is damaged: KeyError.*'place'"),
        (put("model", value=3), "rank_00000.json is damaged"),
        (put("model", "file", value="../a"), "would lie outside of it"),
        (put("model", "file", value="nowhere.safetensors"), "nowhere.safetensors"),
        (put("model", "file", value="x" * 300), "cannot be opened: File name too long"),
        (put("model", "pieces", value=[]), "rank_00000.json is damaged: .*'model' has no 'file' or no 'pieces'"),
        (put(*PIECE, "layout", drop=True), "'unused' is damaged"),
        (put(*PIECE, "range", value=["0", "3"]), "'unused' is damaged"),
        (put(*PIECE, "logical", value={"other": [3]}), "'unused' is damaged.*do not agree"),
        (put(*PIECE, "range", value=[0, 4]), "'unused' is damaged.*do not agree"),
        (put(*PIECE, "plans", value=[[[]]]), "'unused' is damaged"),
        (put("values", drop=True), "rank_00000.json holds no 'values' with a 'structure'"),
        (put("values", "structure", value={"dict": []}), "'values': it has no 'user_content'"),
        (put("values", "structure", value={"tensor": "x"}), "rank_00000"),
    ],
)
def test_a_record_made_by_hand(tmp_path: Path, change: Change, message: str):
    by_hand(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, "a", *training(mlp, seed=1))


@pytest.mark.parametrize(("name", "junk"), [("torch", 3), ("numpy", {"tuple": [1]})])
def test_a_random_state_made_by_hand(tmp_path: Path, name: str, junk: Any):
    def change(text: str) -> str:
        record = json.loads(text)
        values = dict(record["values"]["structure"]["dict"])
        (entry,) = [pair for pair in values["random"]["dict"] if pair[0] == name]
        entry[1] = junk
        return json.dumps(record)

    by_hand(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"the random state in .*a is damaged"):
        load_checkpoint(tmp_path, "a", *training(mlp, seed=1))


def test_memory_is_for_what_the_files_hold(tmp_path: Path):
    by_hand(tmp_path, put(*PIECE, "logical", value={"unused": [2**40]}))
    with pytest.raises(CheckpointError, match="'unused': the checkpoint holds 3 of the 1099511627776 elements"):
        weight_source(tmp_path, "a").read("unused")


def saved(root: Path, *tags: str) -> None:
    for tag in tags:
        save_checkpoint(root, tag, nn.Linear(2, 2), user_content=tag)


def claim(folder: Path, counter: int) -> None:
    """Damage the manifest where it says which number it is."""
    path = folder / "manifest.json"
    path.write_bytes(re.sub(rb'"counter": \d+', b'"counter": %d' % counter, path.read_bytes()))


def counter_of(folder: Path) -> int:
    return json.loads((folder / "manifest.json").read_text())["counter"]


def test_a_damaged_manifest_is_not_believed_about_its_number(tmp_path: Path):
    """An old one that says it is the newest hides nothing; the newest that says it is old is not passed over."""
    saved(tmp_path / "old", "a", "b")
    claim(tmp_path / "old" / "a", 9)
    assert load_checkpoint(tmp_path / "old") == "b"
    with pytest.raises(CheckpointError, match=r"a/manifest.json differs from its checksum"):
        load_checkpoint(tmp_path / "old", "a")
    saved(tmp_path / "new", "a", "b")
    claim(tmp_path / "new" / "b", 0)
    with pytest.raises(CheckpointError, match=r"b/manifest.json differs from its checksum"):
        load_checkpoint(tmp_path / "new")
    assert load_checkpoint(tmp_path / "new", "a") == "a"


def test_a_new_save_is_above_whatever_is_there(tmp_path: Path):
    saved(tmp_path, "a", "b", "c")
    (tmp_path / "b" / "done").unlink()
    claim(tmp_path / "c" / "", 1)
    saved(tmp_path, "d")
    assert counter_of(tmp_path / "d") == 4
    assert load_checkpoint(tmp_path) == "d"
    (tmp_path / ".saving-00000009").mkdir()
    saved(tmp_path, "e")
    assert counter_of(tmp_path / "e") == 10 and not (tmp_path / ".saving-00000009").exists()


def no_file(mark: Path) -> None:
    mark.unlink()
    mark.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda mark: mark.write_bytes(b""), "b/manifest.json differs from its checksum"),
        (lambda mark: mark.write_bytes(b"\xff" + mark.read_bytes()[1:]), "b"),
        (no_file, "b"),
    ],
)
def test_a_damaged_mark_of_the_newest_is_no_missing_checkpoint(tmp_path: Path, damage: Any, message: str):
    """As of a file system that lost the last write: neither is an older one loaded, nor a first start believed."""
    saved(tmp_path, "a", "b")
    damage(tmp_path / "b" / "done")
    for tag in (None, "b"):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, tag)
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "nxd-checkpoint 2.0"}, "format 'nxd-checkpoint 2.0'; this release reads nxd-checkpoint 1.1"),
        ({"counter": 1 << 70}, "'counter': Input should be less than .*, got 118059162"),
        ({"degrees": {"tp": 1}}, "'degrees': "),
        ({"saved_at": "now"}, "'saved_at': Input should be a valid number, got 'now'"),
        ({"world_size": "two"}, "'world_size': Input should be a valid integer, got 'two'"),
    ],
)
def test_a_manifest_that_cannot_be_meant_is_named(tmp_path: Path, change: dict[str, object], message: str):
    """It is the newest, so an older one must not silently replace it."""
    saved(tmp_path, "a", "b")
    resign(tmp_path / "b", **change)
    for tag in (None, "b"):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, tag)
    assert load_checkpoint(tmp_path, "a") == "a"


def test_has_checkpoint_says_what_load_does(tmp_path: Path):
    assert not has_checkpoint(tmp_path) and not has_checkpoint(tmp_path, "a")
    saved(tmp_path, "a", "5")
    assert has_checkpoint(tmp_path / "a") and load_checkpoint(tmp_path / "a", model=nn.Linear(2, 2)) == "a"
    assert has_checkpoint(tmp_path, 5) and load_checkpoint(tmp_path, 5) == "5"  # pyright: ignore
    assert not has_checkpoint(tmp_path, "b")
    for tag in ("a", "5"):
        path = tmp_path / tag / "manifest.json"
        path.write_bytes(path.read_bytes()[:-9])
    assert has_checkpoint(tmp_path) and has_checkpoint(tmp_path, "a")  # there is one, and it is damaged
    with pytest.raises(CheckpointError, match="differs from its checksum"):
        load_checkpoint(tmp_path)
