"""Writing an artifact, or a loaded model again: whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nxd_infer.artifact.reader import artifact_digest
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import ArtifactCorruptError, ArtifactError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import parallel_model_load, parallel_model_save
from tests.support import toy_artifacts as toy


def test_files_are_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        path = toy.build(tmp_path / "deep" / "artifact")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.rglob("*") if file.is_file()} == {0o640}
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert load_artifact(path).digest == artifact_digest(path)


def leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


def test_leaving_without_commit_leaves_nothing(tmp_path):
    with ArtifactWriter(tmp_path / "artifact") as writer:
        writer.write_bytes("config.json", b"{}")
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(tmp_path / "artifact") as writer:
        writer.write_bytes("graphs/a/ir.json", b"{}")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", ["os.fsync", "os.rename", "nxd_infer.artifact.writer.hash_file"])
def test_an_interrupt_during_commit_keeps_the_old_artifact(tmp_path, monkeypatch, stage):
    old = toy.build(tmp_path / "artifact")
    before = artifact_digest(old)
    if stage == "os.rename":
        monkeypatch.setattr("nxd_infer.artifact.writer._exchange", lambda *_: False)
    monkeypatch.setattr(stage, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        toy.build(tmp_path / "artifact", weights=toy.logical_weights(1))
    monkeypatch.undo()
    assert artifact_digest(old) == before
    load_artifact(old)
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("exchange", [True, False])
def test_replaces_an_artifact_whole(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr("nxd_infer.artifact.writer._exchange", lambda *_: False)
    first = toy.build(tmp_path / "artifact")
    digest = artifact_digest(first)
    (first / "stray.txt").write_text("kept by nobody")
    second = toy.build(tmp_path / "artifact", weights=toy.logical_weights(1))
    assert second == first
    assert load_artifact(second).digest != digest
    assert not (second / "stray.txt").exists()
    assert leftovers(tmp_path) == []


def test_says_what_it_replaced_if_that_is_of_another_model(tmp_path, caplog):
    def named(name):
        return lambda manifest: manifest.metadata.update(model_name=name)

    def said(**options):
        caplog.clear()
        toy.build(tmp_path / "artifact", **options)
        return [record.getMessage() for record in caplog.records]

    assert said() == said(weights=toy.logical_weights(1)) == said(degree=1) == []
    (told,) = said(change=named("llama"))
    assert re.fullmatch(
        rf"{tmp_path / 'artifact'}: replaced the artifact of another model, \([.0-9]+ KiB, 4 \w+\)", told
    )
    assert said(change=named("llama")) == []
    (told,) = said(change=named("bert"))
    assert "another model, 'llama' (" in told
    (tmp_path / "artifact" / "manifest.json").write_text("{}")  # damaged: nobody knows what it was
    assert said() == []


def test_a_mount_point_is_refused_before_anything_is_written():
    with pytest.raises(ArtifactError, match=r"mount point.*below it"):
        ArtifactWriter("/dev").check_target()


def test_replaces_nothing_but_artifacts_and_empty_directories(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ArtifactError, match=r"holds 1 entries and no manifest\.json"):
        toy.build(precious)
    assert (precious / "thesis.txt").read_text() == "years of work"
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ArtifactError, match="not a directory"):
        toy.build(file)
    link = tmp_path / "link"
    link.symlink_to(precious)
    with pytest.raises(ArtifactError, match="not a directory"):
        toy.build(link)
    (tmp_path / "empty").mkdir()
    load_artifact(toy.build(tmp_path / "empty"))
    with pytest.raises(ArtifactError, match="exists already"), ArtifactWriter(tmp_path / "empty", replace=False):
        pass


def test_what_appears_at_the_target_meanwhile_is_left_alone(tmp_path):
    target = tmp_path / "artifact"

    def appear(_):
        target.mkdir()
        (target / "mine.txt").write_text("mine")

    with pytest.raises(ArtifactError, match="not an artifact"):
        toy.build(target, change=appear)
    assert (target / "mine.txt").read_text() == "mine"
    assert leftovers(tmp_path) == []


def test_symbolic_links_are_not_stored(tmp_path):
    def link(_):
        (next(tmp_path.glob(".artifact.tmp-*")) / "link").symlink_to("/etc/hostname")

    with pytest.raises(ArtifactError, match="no symbolic links"):
        toy.build(tmp_path / "artifact", change=link)


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


def test_the_second_rename_failing_puts_the_old_artifact_back(tmp_path, monkeypatch):
    old = toy.build(tmp_path / "artifact")
    digest = artifact_digest(old)
    monkeypatch.setattr("nxd_infer.artifact.writer._exchange", lambda *_: False)
    rename, calls = os.rename, []

    def fails_once(source, target):
        calls.append(target)
        if len(calls) == 3:  # the first finds an artifact there
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_once)
    with pytest.raises(ArtifactError, match="Input/output error"):
        toy.build(tmp_path / "artifact", weights=toy.logical_weights(1))
    assert artifact_digest(old) == digest
    assert leftovers(tmp_path) == []
