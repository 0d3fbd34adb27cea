"""Who reads while another one saves into the folder gets a whole checkpoint, before or after the save."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.checkpoint.storage import LocalStorage
from nxd_infer.errors import CheckpointError


def save(root: Path, tag: str, number: float, **options: Any) -> None:
    model = nn.Linear(2, 2)
    for weight in model.parameters():
        nn.init.constant_(weight, number)
    save_checkpoint(root, tag, model, user_content=number, **options)


def unnamed(root: Path) -> None:
    """A checkpoint that has not got its name yet."""
    save(root, "last", 1.0)
    (root / "last").rename(root / ".saving-00000001")


def unnamed_beside_its_name(root: Path) -> None:
    unnamed(root)
    (root / "last").mkdir()


def two(root: Path) -> None:
    for tag in ("1", "2"):
        save(root, tag, float(tag))


def name(root: Path) -> None:
    (root / ".saving-00000001").rename(root / "last")


STORIES = {
    "saved again": (lambda root: save(root, "last", 1.0), lambda root: save(root, "last", 2.0)),
    "removed": (two, lambda root: save(root, "3", 3.0, num_kept_ckpts=1)),
    "named": (unnamed, name),
    "named beside": (unnamed_beside_its_name, name),
}


def at_look(patch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> Callable[[], bool]:
    """Act after the ``number``-th look at the folder; the result tells whether there were as many."""
    looks = 0

    def acting(method: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: LocalStorage, *arguments: Any) -> Any:
            nonlocal looks
            found = method(self, *arguments)
            looks += 1
            if looks == number:
                act()
            return found

        return look

    for name in ("folders", "files", "read", "path"):
        patch.setattr(LocalStorage, name, acting(getattr(LocalStorage, name)))
    return lambda: looks >= number


def loaded(root: Path) -> set[float]:
    model = nn.Linear(2, 2)
    content = load_checkpoint(root, model=model)
    return {content, *model.weight.flatten().tolist(), *model.bias.tolist()}


def for_a_trace(root: Path) -> set[float]:
    source = weight_source(root)
    return {*source.read("weight").flatten().tolist(), *source.read("bias").tolist()}


@pytest.mark.parametrize("read", [loaded, for_a_trace])
@pytest.mark.parametrize("story", STORIES)
def test_at_every_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, story: str, read: Callable[[Path], set[float]]
):
    begin, act = STORIES[story]
    begin(tmp_path / "begin")
    for number in range(1, 100):
        root = Path(shutil.copytree(tmp_path / "begin", tmp_path / str(number)))
        with monkeypatch.context() as patch:
            acted = at_look(patch, number, partial(act, root))
            (found,) = read(root)
        assert found in (1.0, 2.0, 3.0)
        if not acted():
            assert number > 5
            return
    raise AssertionError("reading does not end")


def test_a_tag_that_is_saved_again_at_each_try_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, "last", 1.0)
    verify = Archive.verify

    def beside(self: Archive, *arguments: Any) -> None:
        verify(self, *arguments)
        save(tmp_path, "last", 2.0)

    monkeypatch.setattr(Archive, "verify", beside)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"last was removed or saved again while it was read: .*num_kept_ckpts"):
        load_checkpoint(tmp_path, "last", model)
    assert torch.equal(model.weight, before)


def test_a_reader_keeps_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On NFS their names stay, so that their folder cannot be removed: the save is complete, the next ones tidy up."""
    real = os.rmdir
    held = [".removing-1", ".removing-last"]

    def rmdir(path: Any, **options: Any) -> None:
        if any(os.fspath(path).rpartition("/")[2].startswith(name) for name in held):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        real(path, **options)

    save(tmp_path, "1", 1.0)
    save(tmp_path, "last", 2.0)
    monkeypatch.setattr(os, "rmdir", rmdir)
    for _ in range(2):
        save(tmp_path, "last", 3.0, num_kept_ckpts=1)
    assert load_checkpoint(tmp_path) == 3.0
    assert sorted(path.name[:10] for path in tmp_path.iterdir()) == [".removing-"] * 3 + ["last"]
    held.clear()
    save(tmp_path, "last", 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
