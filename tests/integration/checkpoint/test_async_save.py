"""Asynchronous saves: failures are reported, and saves that make progress are waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nxd_infer.checkpoint import save as checkpoint_write
from nxd_infer.checkpoint.api import load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.contents import Content
from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.save import wait_for_ranks, write_rank
from nxd_infer.checkpoint.storage import LocalStorage, storage_of
from nxd_infer.errors import CheckpointError
from tests.integration.checkpoint.test_storage import bucket  # noqa: F401  (a fixture)

FAILING = """
import resource, sys, torch
from nxd_infer.checkpoint.api import save_checkpoint
{before}
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))  # as a disk that is full
save_checkpoint(sys.argv[1], "big", torch.nn.Linear(300, 300), async_save=True)
print("training goes on")
{after}
"""


def failing(root: Path, before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
    code = FAILING.format(before=before, after=after)
    return subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, timeout=600)


def test_a_failed_last_save_is_no_success(tmp_path: Path):
    """Without a call that waits: the process ends with an error, after its own clean-up, and older checkpoints stay."""
    save_checkpoint(tmp_path, "first", torch.nn.Linear(3, 3), user_content=1)
    done = failing(tmp_path, before="import atexit; atexit.register(lambda: print('cleaned up'))")
    assert done.returncode == 1, done
    assert done.stdout == "training goes on\ncleaned up\n"
    assert "the last asynchronous save failed" in done.stderr and str(tmp_path) in done.stderr
    assert load_checkpoint(tmp_path) == 1 and [path.name for path in tmp_path.iterdir()] == ["first"]


@pytest.mark.parametrize("call", ["save_checkpoint(sys.argv[1], 'next')", "checkpoint.wait_for_save()"])
def test_a_failed_save_is_raised_by_the_next_call(tmp_path: Path, call: str):
    """Once; a process that has caught it ends as it likes."""
    after = (
        "from nxd_infer.checkpoint import api as checkpoint; from nxd_infer.errors import CheckpointError\n"
        f"try: {call}\nexcept CheckpointError as error: print(error)"
    )
    done = failing(tmp_path, after=after)
    assert done.returncode == 0 and "the last asynchronous save failed" in done.stdout and not done.stderr, done


# --- waiting for other ranks ------------------------------------------------------------------------------


class Folder(LocalStorage):
    """What rank 0 sees of a folder: ``names`` at each look."""

    def __init__(self, root: Path, names: list[dict[str, int]]):
        super().__init__(root)
        self.names = iter(names)

    def files(self, folder: str) -> dict[str, int]:
        return next(self.names)


def test_a_save_that_makes_progress_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However long it takes in all; one where nothing happens is given up."""
    monkeypatch.setattr(checkpoint_write, "SILENCE_SECONDS", 0.0)
    whole = {f"{rank_stem(0)}.json": 1}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{rank_stem(0)}.json").write_text('{"blake3": {"file": "its"}}')
    looks = [*({"rank_00000.alive": n} for n in range(20)), whole]
    assert wait_for_ranks(Folder(tmp_path, looks), "a", 1)["file"] == "its"
    silent = Folder(tmp_path, [{"rank_00000.alive": 1}] * 1000)
    with pytest.raises(CheckpointError, match=r"nothing came for 0 s; missing: \['rank_00000.json'\]"):
        wait_for_ranks(silent, "a", 1)


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_rank_says_that_it_goes_on(tmp_path: Path, where: str, request, monkeypatch: pytest.MonkeyPatch):
    """While it uploads, or reads a large file for its checksum, a small file grows; it goes before the rank's JSON."""
    monkeypatch.setattr(checkpoint_write, "HEARTBEAT_SECONDS", 0.0)
    files = {"model.tp_rank_00.pp_rank_00.safetensors": {"a": torch.zeros(1 << 22)}}
    content = Content(files, {"place": {}})
    if where == "bucket":
        _, objects, calls = request.getfixturevalue("bucket")
        write_rank(storage_of("s3://models"), "a", 1, content)
        signs = [number for number, call in enumerate(calls) if call == "PUT models/a/rank_00001.alive"]
        assert len(signs) > 4 and signs[-1] > calls.index("PUT models/a/rank_00001.alive")
        model = calls.index(f"PUT models/a/{next(iter(files))}")
        assert any(number < model for number in signs), "before the first upload is done"
        assert calls[-2:] == ["DELETE models/a/rank_00001.alive", "PUT models/a/rank_00001.json"]
        assert len(objects) == 2
        return
    seen: list[int] = []
    storage = LocalStorage(tmp_path)
    (tmp_path / "a").mkdir()
    own = storage.write

    def write(name: str, data: bytes) -> None:
        own(name, data)
        seen.append(storage.files("a")["rank_00001.alive"])

    monkeypatch.setattr(storage, "write", write)
    write_rank(storage, "a", 1, content)
    assert seen == list(range(1, len(seen) + 1)) and len(seen) > 3
    assert sorted(storage.files("a")) == [*files, "rank_00001.json"]


def test_the_next_save_after_a_failure_gets_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = torch.nn.Linear(3, 3)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_write, "save_file", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
        save_checkpoint(tmp_path, "a", model, async_save=True)
        with pytest.raises(CheckpointError, match=r"asynchronous save failed: .* read or written: the disk is full"):
            wait_for_save()
    save_checkpoint(tmp_path, "b", model, user_content=2, async_save=True)
    wait_for_save()
    assert load_checkpoint(tmp_path) == 2
