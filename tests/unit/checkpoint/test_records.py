"""Records of ranks without checksums, made or changed by hand: what is wrong in them is named, never a raw error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import CheckpointError
from nxd_infer.trainer.data import ResumableLoader
from tests.support.checkpoint.older import without_checksums
from tests.support.trainer.jobs import trained_mlp, training
from tests.support.trainer.models import mlp

RECORD = "rank_00000.json"
Change = Callable[[Any], Any]


def bare(root: Path, change: Callable[[str], str]) -> None:
    """A checkpoint as the first version wrote it, without checksums, with a changed record."""
    save_checkpoint(root, "a", *trained_mlp(), user_content=1)
    folder = root / "a"
    (folder / RECORD).write_text(change((folder / RECORD).read_text()))
    without_checksums(folder)


def put(*path: str, value: Any = None, drop: bool = False) -> Change:
    """A record with another value at a place, or without it."""

    def change(record: Any) -> Any:
        *outer, last = path
        inner = record
        for key in outer:
            inner = inner[key]
        if drop:
            del inner[last]
        else:
            inner[last] = value
        return record

    return change


PIECE = ("model", "pieces", "unused")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: [record], "must hold an object"),
        (put("place", drop=True), "'place' must be an object with a whole number for tp and dp, got None"),
        (put("model", value=3), "'model' must be an object with the name of a file, got 3"),
        (put("model", "file", value="../a"), "would lie outside of it"),
        (put("model", "file", value="nowhere.safetensors"), "nowhere.safetensors"),
        (put("model", "file", value="x" * 300), "cannot be opened: File name too long"),
        (put("model", "pieces", value=[]), r"'model': 'pieces' must be an object of objects, got \[\]"),
        (put(*PIECE, "layout", drop=True), "'unused' is damaged"),
        (put(*PIECE, "logical", value={"unused": ["3"]}), "'unused' is damaged"),
        (put(*PIECE, "range", value=["0", "3"]), "'unused' is damaged"),
        (put(*PIECE, "shape", value=[4]), "'unused' is damaged.*do not agree"),
        (put(*PIECE, "logical", value={"other": [3]}), "'unused' is damaged.*do not agree"),
        (put(*PIECE, "range", value=[0, 4]), "'unused' is damaged.*do not agree"),
        (put("model", "pieces", "down.weight", "layout", "axes", value=[[]]), "'down.weight' is damaged"),
        (put("optimizer", "group_names", value=[[{}]]), r"'group_names' must be a list of lists of names, got"),
        (put("optimizer", "pieces", "unused", "values", value=[1]), "'unused' is damaged"),
        (put(*PIECE, "plans", value=[[[]]]), "'unused' is damaged"),
        (put("optimizer", "param_groups", drop=True), "'param_groups' must be a list of objects, got None"),
        (put("values", drop=True), "rank_00000.json holds no 'values'"),
        (put("values", "structure", drop=True), "'values': it has no 'structure'"),
        (put("values", "structure", value={"dict": []}), "'values': it has no 'user_content'"),
        (put("values", "structure", value={"dict": [[{"list": []}, 1]]}), "the structure of the checkpoint is damaged"),
        (put("values", "structure", value={"tensor": "x"}), "rank_00000"),
    ],
)
def test_a_record_made_by_hand(tmp_path: Path, change: Change, message: str):
    bare(tmp_path, lambda text: json.dumps(change(json.loads(text))))
    with pytest.raises(CheckpointError, match=message) as raised:
        load_checkpoint(tmp_path, "a", *training(mlp, seed=1))
    assert str(tmp_path / "a") in str(raised.value) or "structure" in message


@pytest.mark.parametrize(
    ("name", "junk"), [("torch", 3), ("python", {"tuple": [1, 2]}), ("streams", True), ("numpy", {"tuple": [1]})]
)
def test_a_random_state_made_by_hand(tmp_path: Path, name: str, junk: Any):
    def change(text: str) -> str:
        record = json.loads(text)
        values = dict(record["values"]["structure"]["dict"])
        (entry,) = [pair for pair in values["random"]["dict"] if pair[0] == name]
        entry[1] = junk
        return json.dumps(record)

    bare(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"the random state in .*a is damaged"):
        load_checkpoint(tmp_path, "a", *training(mlp, seed=1))


@pytest.mark.parametrize("state", [None, {}, {"epoch": "1", "samples": 0}, {"epoch": 0, "samples": -4}])
def test_a_position_made_by_hand(state: Any):
    loader = ResumableLoader([1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match="is not a position of a ResumableLoader"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("depth", [400, 100_000])
def test_a_record_that_is_nested_deeply(tmp_path: Path, depth: int):
    def nest(text: str) -> str:
        before, _, after = text.partition('"structure": ')
        return f'{before}"structure": {"[" * depth}{"]" * depth}, "x": {after}'

    bare(tmp_path, nest)
    with pytest.raises(CheckpointError, match=r"damaged|nested too deeply"):
        load_checkpoint(tmp_path, "a", *training(mlp, seed=1))


def test_memory_is_for_what_the_files_hold(tmp_path: Path):
    """A record that claims a tensor of terabytes: the claim is compared with the files before memory is allocated."""
    bare(tmp_path, lambda text: json.dumps(put(*PIECE, "logical", value={"unused": [2**40]})(json.loads(text))))
    with pytest.raises(CheckpointError, match="'unused': the checkpoint holds 3 of the 1099511627776 elements"):
        weight_source(tmp_path, "a").read("unused")
