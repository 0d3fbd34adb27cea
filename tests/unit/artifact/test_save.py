"""A loaded model is saved again: copied and checked, or linked where its artifact is temporary."""

from __future__ import annotations

import os

import pytest
import torch

from nxd_infer.errors import ArtifactCorruptError, ArtifactError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save
from tests.support import toy_artifacts as toy


def test_save_copies_a_loaded_model_and_checks_it(tmp_path):
    source = toy.build(tmp_path / "a", degree=1)
    model = parallel_model_load(source)
    parallel_model_save(model, tmp_path / "b")
    copy = load_artifact(tmp_path / "b")
    assert copy.manifest.files == load_artifact(source).manifest.files
    assert copy.digest == load_artifact(source).digest
    weights = source / "weights/rank_00.safetensors"
    assert (tmp_path / "b/weights/rank_00.safetensors").stat().st_ino != weights.stat().st_ino
    parallel_model_save(model, source)  # onto itself: nothing to do
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactCorruptError, match="rank_00"):
        parallel_model_save(model, tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_save_links_a_temporary_artifact_which_goes_with_its_owner(tmp_path):
    path = toy.build(tmp_path / "temporary", degree=1)
    model = parallel_model_load(path)
    artifact = load_artifact(path, temporary=True)
    model.artifact = artifact
    inode = (path / "weights/rank_00.safetensors").stat().st_ino
    parallel_model_save(model, tmp_path / "saved")
    assert (tmp_path / "saved/weights/rank_00.safetensors").stat().st_ino == inode
    artifact.discard()
    assert not path.exists()
    load_artifact(tmp_path / "saved")


def test_save_wants_a_traced_model(tmp_path):
    with pytest.raises(ArtifactError, match="got Linear"):
        parallel_model_save(torch.nn.Linear(1, 1), tmp_path / "x")  # pyright: ignore[reportArgumentType]
