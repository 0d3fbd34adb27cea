"""Which checkpoint is the newest: damaged manifests and marks, what killed saves left, and other formats."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint
from nxd_infer.errors import CheckpointError


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
        (lambda mark: mark.write_bytes(b""), "b/done is empty"),
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
        (
            {"format": "nxd-checkpoint 2.0"},
            r"format 'nxd-checkpoint 2.0'; this release reads nxd-checkpoint 1.0 and",
        ),
        ({"counter": 1 << 70}, r"'counter' must be a whole number from 1 to 2\^62, got 118059162"),
        ({"degrees": {"tp": 1}}, r"'degrees' must"),
        ({"saved_at": "now"}, r"'saved_at' must be a time in seconds, got 'now'"),
        ({"sha256": ["x"]}, r"'sha256' must be an object of strings, got \['x'\]"),
        ({"world_size": "two"}, r"'world_size' must be a whole number of at least 1, got 'two'"),
    ],
)
def test_a_manifest_that_cannot_be_meant_is_named(tmp_path: Path, change: dict[str, object], message: str):
    """It is the newest, so an older one must not silently replace it; with and without its own checksum."""
    saved(tmp_path, "a", "b")
    path = tmp_path / "b" / "manifest.json"
    text = json.dumps({**json.loads(path.read_text()), **change}).encode()
    path.write_bytes(text)
    (tmp_path / "b" / "done").write_text(hashlib.sha256(text).hexdigest())
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


def test_what_was_saved_again_is_not_replaced_by_what_was_before(tmp_path: Path):
    """A whole save that was never renamed (it was damaged then, and restored now) is older than its tag."""
    save_checkpoint(tmp_path, "a", user_content="before")
    shutil.copytree(tmp_path / "a", tmp_path / "aside")
    save_checkpoint(tmp_path, "a", user_content="again")
    (tmp_path / "aside").rename(tmp_path / ".saving-00000001")
    saved(tmp_path, "b")
    assert load_checkpoint(tmp_path, "a") == "again"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
