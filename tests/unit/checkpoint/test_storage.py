"""What a path names, and a store that fsspec brings, without a package of its own."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from nxd_infer.checkpoint.api import has_checkpoint, load_checkpoint, save_checkpoint, wait_for_save
from nxd_infer.checkpoint.storage import LocalStorage, RemoteStorage, storage_of
from nxd_infer.errors import CheckpointError
from tests.support.trainer.models import MLP


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
    """As in a bucket, without a package of its own."""
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
