"""A job that loads while another one saves into the folder: it gets a whole checkpoint, before or after the save."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from nxd_infer.checkpoint import api
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint
from nxd_infer.checkpoint.storage import LocalStorage


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


@pytest.mark.check
@pytest.mark.parametrize("time", [1, 2, 3])
def test_one_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: int):
    """Between its two files, by a save that keeps the newest ones."""
    save(tmp_path, "1", "2", "3")
    when_read(monkeypatch, "1/done", time, lambda: save(tmp_path, "4", num_kept_ckpts=3))
    assert load(tmp_path) in ("3", "4")


@pytest.mark.check
@pytest.mark.parametrize("time", [1, 2, 3])
def test_the_same_tag_is_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: int):
    """The mark is the old one's, the manifest the new one's."""
    save(tmp_path, "last")
    when_read(monkeypatch, "last/done", time, lambda: save(tmp_path, "last"))
    assert load(tmp_path) == "last"


@pytest.mark.check
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


@pytest.mark.check
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


@pytest.mark.check
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
