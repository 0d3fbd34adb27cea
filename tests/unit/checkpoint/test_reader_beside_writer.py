"""A job that loads while another one saves into the folder: it gets a whole checkpoint, before or after the save.

So does what reads a stored checkpoint outside of a job.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.checkpoint import api, archive
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.open import open_archive
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.checkpoint.storage import LocalStorage
from nxd_infer.errors import CheckpointError


def save(root: Path, *tags: str, **options: Any) -> None:
    for tag in tags:
        save_checkpoint(root, tag, nn.Linear(2, 2), user_content=tag, **options)


def load(root: Path) -> Any:
    return load_checkpoint(root, model=nn.Linear(2, 2))


def when_read(monkeypatch: pytest.MonkeyPatch, name: str, time: int, act: Callable[[], object]) -> None:
    """Act after a file was read for the ``time``-th time."""
    real, seen = LocalStorage.read, []

    def read(self: LocalStorage, file: str) -> bytes:
        data = real(self, file)
        seen.append(file)
        if file == name and seen.count(name) == time:
            act()
        return data

    monkeypatch.setattr(LocalStorage, "read", read)


@pytest.mark.parametrize("time", [1, 2, 3])
def test_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: int):
    """Between its two files, by a save that keeps the newest ones."""
    save(tmp_path, "1", "2", "3")
    when_read(monkeypatch, "1/done", time, lambda: save(tmp_path, "4", num_kept_ckpts=3))
    assert load(tmp_path) in ("3", "4")


@pytest.mark.parametrize("time", [1, 2, 3])
def test_the_same_tag_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: int):
    """The mark is the old one's, the manifest the new one's."""
    save(tmp_path, "last")
    when_read(monkeypatch, "last/done", time, lambda: save(tmp_path, "last"))
    assert load(tmp_path) == "last"


def test_a_newer_one_is_whole_before_the_ranks_open_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rank 0 has found the older one, which is what all of them load; if it is replaced, they find the newer one."""
    real = api._find
    for tags, wanted in ((("1", "2"), "1"), (("last", "last"), "last")):
        root = tmp_path / wanted
        save(root, tags[0])
        newer = list(tags[1:])

        def find(*arguments: Any, root: Path = root, newer: list[str] = newer) -> int:
            found = real(*arguments)
            save(root, *newer)
            newer.clear()
            return found

        monkeypatch.setattr(api, "_find", find)
        assert load(root) == wanted


@pytest.mark.parametrize("both", [False, True])
def test_one_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both: bool):
    """It was listed under its old name, and is read under none or under both: a job would begin anew."""
    save(tmp_path, "last")
    saving, last = tmp_path / ".saving-00000001", tmp_path / "last"
    last.rename(saving)
    if both:
        when_read(monkeypatch, ".saving-00000001/manifest.json", 2, lambda: saving.rename(last))
        last.mkdir()
    else:
        real, listed = LocalStorage.folders, []

        def folders(self: LocalStorage) -> list[str]:
            found = real(self)
            if not listed:
                saving.rename(last)
            listed.append(found)
            return found

        monkeypatch.setattr(LocalStorage, "folders", folders)
    assert load(tmp_path) == "last"


def test_a_reader_keeps_files_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On NFS their names stay, so that their folder cannot be removed: the save is complete, the next ones tidy up."""
    real = os.rmdir
    held = [".removing-1", ".removing-last"]

    def rmdir(path: Any, **options: Any) -> None:
        if any(os.fspath(path).rpartition("/")[2].startswith(name) for name in held):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        real(path, **options)

    save(tmp_path, "1", "last")
    monkeypatch.setattr(os, "rmdir", rmdir)
    for _ in range(2):
        save(tmp_path, "last", num_kept_ckpts=1)
    assert load(tmp_path) == "last"
    assert sorted(path.name[:10] for path in tmp_path.iterdir()) == [".removing-"] * 3 + ["last"]
    held.clear()
    save(tmp_path, "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def save_number(root: Path, tag: str, number: float, **options: Any) -> None:
    model = nn.Linear(2, 2)
    for weight in model.parameters():
        nn.init.constant_(weight, number)
    save_checkpoint(root, tag, model, user_content=number, **options)


def after(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object], times: int = 1) -> None:
    """Act after a method of Archive, the first ``times`` that it is called."""
    real, left = getattr(Archive, name), [times]

    def method(self: Archive, *arguments: Any) -> Any:
        result = real(self, *arguments)
        left[0] -= 1
        if left[0] >= 0:
            act()
        return result

    monkeypatch.setattr(Archive, name, method)


@pytest.mark.parametrize("method", ["verify", "value", "pieces"])
def test_weights_and_contents_are_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    """The names that the first files were read by are those of another checkpoint's when the others are read."""
    save_number(tmp_path, "", 1.0)
    after(monkeypatch, method, lambda: save_number(tmp_path, "", 2.0))
    model = nn.Linear(2, 2)
    assert load_checkpoint(tmp_path, model=model) == model.weight[0, 0] == model.bias[1] == 2.0


def test_what_is_changed_is_read_from_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_number(tmp_path, "", 1.0)
    after(monkeypatch, "replaced", lambda: save_number(tmp_path, "", 2.0))
    model = nn.Linear(2, 2)
    assert load_checkpoint(tmp_path, model=model) == model.weight[0, 0] == 1.0


def test_a_tag_that_is_saved_again_at_each_try_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_number(tmp_path, "last", 1.0)
    after(monkeypatch, "verify", lambda: save_number(tmp_path, "last", 2.0), times=99)
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"last was removed or saved again while it was read: .*num_kept_ckpts"):
        load_checkpoint(tmp_path, "last", model)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("method", ["parts", "verify", "value"])
def test_the_one_that_is_loaded_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    save_number(tmp_path, "1", 1.0)
    after(monkeypatch, method, lambda: save_number(tmp_path, "2", 2.0, num_kept_ckpts=1))
    model = nn.Linear(2, 2)
    assert load_checkpoint(tmp_path, model=model) == model.weight[0, 0] == 2.0


@pytest.mark.parametrize("method", ["parts", "verify"])
def test_weights_for_a_trace_are_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str):
    save_number(tmp_path, "last", 1.0)
    after(monkeypatch, method, lambda: save_number(tmp_path, "last", 2.0))
    source = weight_source(tmp_path)
    save_number(tmp_path, "last", 3.0)  # its files are open
    assert source.read("weight").unique().tolist() == source.read("bias").unique().tolist() == [2.0]


@pytest.mark.parametrize("read", [weight_source, open_archive])
def test_one_gets_its_name_outside_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., Any]):
    save_number(tmp_path, "last", 1.0)
    saving, last = tmp_path / ".saving-00000001", tmp_path / "last"
    last.rename(saving)
    real = archive.find_checkpoint

    def find(*arguments: Any) -> Any:
        found = real(*arguments)
        if saving.exists():
            saving.rename(last)
        return found

    monkeypatch.setattr(archive, "find_checkpoint", find)
    read(tmp_path, "last")
