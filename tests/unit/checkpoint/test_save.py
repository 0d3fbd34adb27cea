"""What is saved comes back, whole also beside a save; tags, asynchronous saves, stores; refusals."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.checkpoint import save as checkpoint_write
from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.folder import rank_stem
from nxd_infer.checkpoint.save import wait_for_ranks
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.checkpoint.storage import LocalStorage, RemoteStorage, storage_of
from nxd_infer.errors import CheckpointError, WeightMismatchError
from tests.support.trainer.jobs import AdamW, trained_mlp, training
from tests.support.trainer.models import MLP, mlp, vectors


class Held(nn.Module):
    def __init__(self, value: torch.Tensor):
        super().__init__()
        self.register_buffer("held", value)


TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]

OTHERS = ["float8_e4m3fn", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fnuz"]


@pytest.mark.parametrize("name", [*TYPES, *OTHERS])
def test_every_type_comes_back_or_is_refused_when_it_is_saved(tmp_path: Path, name: str):
    """Never a checkpoint that says later that it cannot be read. Only what is cut into slices may be refused."""
    value = torch.tensor([1, 0, 1, 1]).to(getattr(torch, name))
    model, other = Held(value), Held(torch.zeros_like(value))
    if name in OTHERS[1:]:
        with pytest.raises(CheckpointError, match=f"torch.{name}"):
            save_checkpoint(tmp_path, "a", model)
        assert not list(tmp_path.iterdir())
        return
    save_checkpoint(tmp_path, "a", model)
    load_checkpoint(tmp_path, "a", model=other)
    found = other.get_buffer("held")
    assert found.dtype == value.dtype and torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def test_tags_and_what_is_kept(tmp_path: Path):
    model = MLP()
    assert not has_checkpoint(tmp_path)
    for step in range(4):
        save_checkpoint(tmp_path, tag=f"step_{step}", model=model, user_content={"step": step}, num_kept_ckpts=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]
    os.utime(tmp_path / "step_3" / "manifest.json", (1, 1))
    os.utime(tmp_path / "step_3", (1, 1))
    assert load_checkpoint(tmp_path)["step"] == 3  # by its number, whatever the clock says
    save_checkpoint(tmp_path, model=model, user_content="no tag")
    save_checkpoint(tmp_path, model=model, num_kept_ckpts=-1, use_xser=True, num_workers=64)  # no limit, not looked at
    assert load_checkpoint(tmp_path, model=model) is None and load_checkpoint(tmp_path, "step_2")["step"] == 2
    (tmp_path / "step_3" / "done").unlink()
    assert has_checkpoint(tmp_path, "step_2") and not has_checkpoint(tmp_path, "step_3")
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint with the tag 'step_3'; complete are: 'step_2', ''"
    ):
        load_checkpoint(tmp_path, "step_3")


def test_states_given_as_dictionaries(tmp_path: Path):
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "dicts", model.state_dict(), optimizer.state_dict(), zero1_optimizer=True)
    other, fresh = training(mlp, seed=5)
    load_checkpoint(tmp_path, "dicts", other, fresh)
    for parts in ((model, optimizer), (other, fresh)):
        parts[0].run_train(**vectors())
        parts[1].step()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
    plain = AdamW(nn.Linear(2, 2).parameters())
    save_checkpoint(tmp_path, "others", nn.Linear(3, 3).state_dict(), plain.state_dict())
    with pytest.raises(CheckpointError, match=r"(?s)model, a dictionary, does not fit this one: .*size mismatch"):
        load_checkpoint(tmp_path, "others", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="it does not fit this optimizer"):
        load_checkpoint(tmp_path, "others", optimizer=fresh)


def test_a_checkpoint_of_another_model(tmp_path: Path):
    model, optimizer = trained_mlp()
    save_checkpoint(tmp_path, "a", model, optimizer)
    with pytest.raises(WeightMismatchError, match=r"up.weight is \[24, 16\], wanted \[24, 32\]"):
        load_checkpoint(tmp_path, "a", MLP(hidden=32))
    with pytest.raises(WeightMismatchError, match=r"missing: 0.weight, 0.bias; unexpected: down.bias"):
        load_checkpoint(tmp_path, "a", nn.Sequential(nn.Linear(2, 2)))
    foreign = nxd.initialize_parallel_optimizer(
        nxd.neuronx_distributed_config(), AdamW, [("other", nn.Parameter(torch.ones(2)))], lr=1.0
    )
    with pytest.raises(WeightMismatchError, match="missing: other"):
        load_checkpoint(tmp_path, "a", optimizer=foreign)
    plain = AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="parallel optimizer, which a AdamW cannot take"):
        load_checkpoint(tmp_path, "a", optimizer=plain)


def test_loading_a_part(tmp_path: Path):
    save_checkpoint(tmp_path, "a", model=nn.Sequential(nn.Linear(2, 2)))
    grown = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3))
    kept = grown[1].weight.detach().clone()
    with pytest.raises(WeightMismatchError, match=r"missing: 1.weight, 1.bias; unexpected: 0.bias \[2\]"):
        load_checkpoint(tmp_path, "a", grown)
    load_checkpoint(tmp_path, "a", grown, strict=False)
    assert torch.equal(grown[1].weight, kept)


def test_a_path_that_is_a_file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match=r"file cannot be read or written: .*File exists"):
        save_checkpoint(path, "a", MLP())
    for tag in (None, "a"):
        with pytest.raises(CheckpointError, match="file is a file; give the folder that save_checkpoint"):
            load_checkpoint(path, tag)
    assert path.read_text() == "mine" and not has_checkpoint(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user_content": {"a": [object()]}}, r"user_content\['a'\]\[0\] is a object, .* it takes tensors"),
        ({"tag": "../a"}, "cannot be a tag"),
        ({"tag": "theirs"}, "exists and is not a checkpoint; it is left alone"),
        ({"num_workers": 33}, "num_workers must be a whole number from 1 to 32, got 33"),
        ({"num_kept_ckpts": 0}, "num_kept_ckpts must be a whole number of at least 1, got 0"),
    ],
)
def test_what_cannot_be_saved(tmp_path: Path, arguments: dict[str, Any], message: str):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, **arguments)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["notes.txt", "theirs"]


def test_an_asynchronous_save_keeps_what_was(tmp_path: Path):
    model, optimizer = trained_mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(3):
        save_checkpoint(tmp_path, f"step_{step}", model, optimizer, user_content=step, async_save=True)
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
    wait_for_save()
    for step in range(3):
        other, fresh = training(mlp, seed=5)
        assert load_checkpoint(tmp_path, f"step_{step}", other, fresh) == step
        for name, value in other.state_dict().items():
            torch.testing.assert_close(value, before[name] + step)
    assert load_checkpoint(tmp_path) == 2


def raising(error: Exception, *_: object) -> None:
    raise error


def test_a_failed_save_is_raised_by_the_next_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, said = nn.Linear(3, 3), r"last asynchronous save failed: .* read or written: the disk is full"
    for call in (wait_for_save, lambda: save_checkpoint(tmp_path, "b", model), lambda: load_checkpoint(tmp_path)):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_write, "write_safetensors", partial(raising, OSError("the disk is full")))
            save_checkpoint(tmp_path, "a", model, async_save=True)
            with pytest.raises(CheckpointError, match=said):
                call()
            with pytest.raises(CheckpointError, match="the disk is full"):  # at once, where it is not beside
                save_checkpoint(tmp_path, "a", model)
    save_checkpoint(tmp_path, "b", model, user_content=2, async_save=True)
    wait_for_save()
    assert load_checkpoint(tmp_path) == 2 and not has_checkpoint(tmp_path, "a")


class Looks(LocalStorage):
    """What rank 0 sees of a folder: ``names`` at each look."""

    def __init__(self, root: Path, names: list[dict[str, int]]):
        super().__init__(root)
        self.names = iter(names)

    def files(self, folder: str) -> dict[str, int]:
        return next(self.names)


def test_a_save_that_makes_progress_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """However long it takes in all; one where nothing happens is given up, and one where a rank has failed."""
    monkeypatch.setattr(checkpoint_write, "SILENCE_SECONDS", 0.0)
    whole = {f"{rank_stem(0)}.json": 1}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{rank_stem(0)}.json").write_text('{"blake3": {"file": "its"}}')
    signs = [{"model.safetensors": n} for n in range(20)]
    assert wait_for_ranks(Looks(tmp_path, [*signs, whole]), "a", 1)["file"] == "its"
    with pytest.raises(CheckpointError, match=r"nothing came for 0 s; missing: \['rank_00000.json'\]"):
        wait_for_ranks(Looks(tmp_path, [{"model.safetensors": 1}] * 1000), "a", 1)
    (tmp_path / "a" / "rank_00001.failed").write_text("the disk is full")
    with pytest.raises(CheckpointError, match=r"rank_00001.failed: the disk is full"):
        wait_for_ranks(Looks(tmp_path, [*signs, {"rank_00001.failed": 1}]), "a", 2)


def test_what_a_path_names(tmp_path: Path):
    assert isinstance(storage_of(tmp_path), LocalStorage)
    for url in (f"file://{tmp_path}", f"local://{tmp_path}"):
        storage = storage_of(url)
        assert isinstance(storage, LocalStorage) and storage.root == tmp_path
    for url in ("s3://bucket/a/b/", Path("s3://bucket/a/b")):
        storage = storage_of(url)
        assert isinstance(storage, RemoteStorage) and storage.where("c") == "s3://bucket/a/b/c"
    with pytest.raises(CheckpointError, match="names no bucket"):
        storage_of("s3://")
    for text in ("simplecache::s3://bucket/a", "S3://bucket/a"):
        with pytest.raises(CheckpointError, match="is not a URL of one store"):
            storage_of(text)
    with pytest.raises(CheckpointError, match="nowhere://a: Protocol not known: nowhere"):
        storage_of("nowhere://a")


def test_a_store_whose_package_is_absent_names_it(monkeypatch: pytest.MonkeyPatch):
    for package in ("s3fs", "gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    loaded = importlib.import_module("fsspec.registry")._registry
    for scheme in ("s3", "gs", "abfs"):
        monkeypatch.delitem(loaded, scheme, raising=False)
    for url, fix in (
        ("s3://b/c", r"Install s3fs .*pip install 'nxd-infer\[s3\]'"),
        ("gs://b", "gcsfs"),
        ("abfs://b", "adlfs"),
    ):
        with pytest.raises(CheckpointError, match=f"{url} needs a package: .*{fix}"):
            save_checkpoint(url, "a", MLP())


def test_a_store_that_fsspec_brings():
    root = "memory://jobs/run"
    assert not has_checkpoint(root) and load_checkpoint(root) is None
    model, other = MLP(), MLP()
    for step in range(4):
        with torch.no_grad():
            model.unused.fill_(step)
        save_checkpoint(root, f"step_{step}", model, user_content=step, num_kept_ckpts=2, async_save=step == 3)
    wait_for_save()
    assert storage_of(root).folders() == ["step_2.00000003", "step_3.00000004"]
    assert load_checkpoint(root, model=other) == 3 and torch.equal(other.unused, model.unused)
    storage = storage_of(root)
    name = "step_3.00000004/model.tp_rank_00.pp_rank_00.safetensors"
    data = storage.read(name)
    storage.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"memory://jobs/run/step_3.00000004/model.*differs from its checksum"):
        load_checkpoint(root, model=other)
    storage.delete("step_3.00000004/done")  # as a killed job leaves it
    assert load_checkpoint(root, model=other) == 2
    save_checkpoint(root, "step_2", model, user_content="again")
    assert storage.folders() == ["step_2.00000005"] and load_checkpoint(root) == "again"


def save(root: Path, tag: str, number: float, **options: Any) -> None:
    model = nn.Linear(2, 2)
    for weight in model.parameters():
        nn.init.constant_(weight, number)
    save_checkpoint(root, tag, model, user_content=number, **options)


def unnamed(root: Path) -> None:
    """A checkpoint that has not got its name yet."""
    save(root, "last", 1.0)
    (root / "last").rename(root / ".saving-00000001")


def two(root: Path) -> None:
    for tag in ("1", "2"):
        save(root, tag, float(tag))


def name(root: Path) -> None:
    (root / ".saving-00000001").rename(root / "last")


STORIES = {
    "saved again": (lambda root: save(root, "last", 1.0), lambda root: save(root, "last", 2.0)),
    "removed": (two, lambda root: save(root, "3", 3.0, num_kept_ckpts=1)),
    "named": (unnamed, name),
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


@pytest.mark.parametrize(
    ("story", "read"), [*((story, loaded) for story in STORIES), ("saved again", for_a_trace), ("named", for_a_trace)]
)
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
