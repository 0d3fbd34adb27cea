"""Writing an artifact, or a loaded model again: whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.reader import artifact_digest
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import ArtifactCorruptError, ArtifactError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save
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


def test_a_mount_point_is_refused_before_anything_is_written():
    with pytest.raises(ArtifactError, match=r"mount point.*below it"):
        ArtifactWriter("/dev").check_target()


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path):
    """For every caller, of whom a trace would otherwise compile for minutes first."""
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"cannot write the artifact .*/file/below/artifact: .*/file is not a dir"):
        ArtifactWriter(tmp_path / "file" / "below" / "artifact").check_target()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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


def test_names_stay_inside(tmp_path):
    with ArtifactWriter(tmp_path / "artifact") as writer:
        for name in ("../x", "/etc/x", "a/../../x", "", "a//b", "./a", "a\\b"):
            with pytest.raises(ArtifactCorruptError, match="not a path inside an artifact"):
                writer.file(name)


def test_symbolic_links_are_not_stored(tmp_path):
    def link(_):
        (next(tmp_path.glob(".artifact.tmp-*")) / "link").symlink_to("/etc/hostname")

    with pytest.raises(ArtifactError, match="no symbolic links"):
        toy.build(tmp_path / "artifact", change=link)


def test_the_manifest_is_written_last(tmp_path, monkeypatch):
    order: list[str] = []
    fsync = os.fsync

    def record(fd):
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record)
    path = toy.build(tmp_path / "artifact")
    files = [name for name in order if "." in name and not name.startswith(".")]
    assert files[-1] == MANIFEST_NAME
    assert set(files) == {p.name for p in path.rglob("*") if p.is_file()}


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


def test_directories_without_locks_can_be_written(tmp_path, monkeypatch):
    """NFS wants a descriptor that may be written for an exclusive lock, which a directory never has."""
    refused = OSError(errno.EBADF, "Bad file descriptor")
    monkeypatch.setattr("nxd_infer.artifact.writer.fcntl.flock", Mock(side_effect=refused))
    monkeypatch.setattr("nxd_infer.artifact.writer._YOUNG", 0.0)
    in_use = tmp_path / ".artifact.tmp-other"
    in_use.mkdir()
    load_artifact(toy.build(tmp_path / "artifact"))
    assert in_use.is_dir()  # perhaps somebody's


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


def test_what_another_writer_finishes_meanwhile_is_kept_unless_it_may_be_replaced(tmp_path):
    """The other one finishes between this one's look at the target and its rename."""
    target = tmp_path / "artifact"

    class Late(ArtifactWriter):
        def check_target(self) -> None:
            super().check_target()
            if self._path is not None:
                toy.build(target, weights=toy.logical_weights(1))

    source = toy.build(tmp_path / "source")
    with Late(target, replace=False) as writer:
        manifest = load_artifact(source).manifest
        for name in manifest.files:
            writer.add(name, source / name)
        with pytest.raises(ArtifactError, match="appeared meanwhile"):
            writer.commit(manifest)
    assert load_artifact(target).digest != artifact_digest(source)
    assert leftovers(tmp_path) == []


def test_weights_that_the_disk_has_no_room_for_are_refused_before_they_are_written(tmp_path):
    much = torch.zeros(1, dtype=torch.uint8).expand(1 << 60)
    with (
        pytest.raises(ArtifactError, match=r"no space left while writing .*GiB free.*free space or choose another"),
        ArtifactWriter(tmp_path / "artifact") as writer,
    ):
        writer.write_safetensors("weights/rank_00.safetensors", {"w": much})
    assert list(tmp_path.iterdir()) == []
