"""Writing an artifact: whole or not at all, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.reader import artifact_digest
from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import ArtifactCorruptError, ArtifactError, ArtifactSpaceError
from nxd_infer.runtime.load import load_artifact
from tests.support import toy_artifacts as toy


def test_files_are_readable_as_the_umask_says(tmp_path):
    before = os.umask(0o027)
    try:
        path = toy.build(tmp_path / "artifact")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.rglob("*") if file.is_file()} == {0o640}
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


def test_writes_and_loads(tmp_path):
    path = toy.build(tmp_path / "deep" / "artifact")
    artifact = load_artifact(path)
    assert artifact.manifest.tp_degree == 2
    assert set(artifact.manifest.files) >= {"weights/rank_00.safetensors", "weights/rank_01.safetensors"}
    assert artifact.digest == artifact_digest(path)
    assert leftovers(path.parent) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_an_interrupt_leaves_nothing(tmp_path, error):
    with pytest.raises(error), ArtifactWriter(tmp_path / "artifact") as writer:
        writer.write_bytes("graphs/a/ir.json", b"{}")
        raise error
    assert os.listdir(tmp_path) == []


def test_leaving_without_commit_leaves_nothing(tmp_path):
    with ArtifactWriter(tmp_path / "artifact") as writer:
        writer.write_bytes("config.json", b"{}")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", ["os.fsync", "os.rename", "nxd_infer.artifact.writer.hash_file"])
def test_an_interrupt_during_commit_keeps_the_old_artifact(tmp_path, monkeypatch, stage):
    old = toy.build(tmp_path / "artifact")
    before = artifact_digest(old)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    if stage == "os.rename":
        monkeypatch.setattr("nxd_infer.artifact.writer._exchange", lambda *_: False)
    monkeypatch.setattr(stage, interrupted)
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


@pytest.mark.parametrize("replace", [True, False])
def test_two_writers_of_one_target_end_with_one_of_their_artifacts_whole(tmp_path, replace):
    """The other one finishes between this one's look at the target and its rename."""
    target = tmp_path / "artifact"

    class Late(ArtifactWriter):
        def check_target(self) -> None:
            super().check_target()
            if self._path is not None:
                toy.build(target, weights=toy.logical_weights(1))

    source = toy.build(tmp_path / "source")
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(Late(target, replace=replace))
        manifest = load_artifact(source).manifest
        for name in manifest.files:
            writer.add(name, source / name)
        if replace:
            writer.commit(manifest)
            assert artifact_digest(target) == artifact_digest(source)
        else:
            with pytest.raises(ArtifactError, match="appeared meanwhile"):
                writer.commit(manifest)
            assert artifact_digest(target) != artifact_digest(source)
    load_artifact(target)
    shutil.rmtree(source)
    assert leftovers(tmp_path) == []


def test_an_old_artifact_that_a_crash_left_aside_is_not_tidied_up(tmp_path, monkeypatch):
    """Where directories cannot be exchanged, a machine may stop between the two renames."""
    old = toy.build(tmp_path / "artifact")
    digest = artifact_digest(old)
    monkeypatch.setattr("nxd_infer.artifact.writer._exchange", lambda *_: False)
    monkeypatch.setattr("nxd_infer.artifact.writer._YOUNG", 0.0)
    rename = os.rename

    def stops(source, target):
        rename(source, target)
        os._exit(9)

    if (pid := os.fork()) == 0:
        real, count = rename, iter(range(9))
        monkeypatch.setattr(os, "rename", lambda a, b: stops(a, b) if next(count) == 1 else real(a, b))
        toy.build(tmp_path / "artifact", weights=toy.logical_weights(1))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert not old.exists()
    toy.build(tmp_path / "artifact", weights=toy.logical_weights(2))
    (left,) = tmp_path.glob(".artifact.old-*")
    assert artifact_digest(left) == digest


def test_directories_without_locks_can_be_written(tmp_path, monkeypatch):
    """NFS wants a descriptor that may be written for an exclusive lock, which a directory never has."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr("nxd_infer.artifact.writer.fcntl.flock", flock)
    monkeypatch.setattr("nxd_infer.artifact.writer._YOUNG", 0.0)
    in_use = tmp_path / ".artifact.tmp-other"
    in_use.mkdir()
    load_artifact(toy.build(tmp_path / "artifact"))
    assert in_use.is_dir()  # perhaps somebody's


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


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 256 kB. Mounting needs root and the right to; without it the file size is limited."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, timeout=600, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here; the test with a file size limit covers this")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True, timeout=600)


@pytest.mark.parametrize("how", ["safetensors", "bytes", "copy", "torchscript"])
def test_a_full_disk_leaves_nothing_loadable(small_disk, tmp_path, how):
    old = toy.build(small_disk / "artifact", degree=1, buckets=toy.BUCKETS[:1])
    digest = artifact_digest(old)
    big = tmp_path / "big"
    big.write_bytes(bytes(1 << 20))
    with pytest.raises(ArtifactSpaceError, match="no space left"), ArtifactWriter(old) as writer:
        if how == "safetensors":
            writer.write_safetensors("weights/rank_00.safetensors", {"w": torch.ones(1 << 18)})
        elif how == "bytes":
            writer.write_bytes("weights/rank_00.safetensors", bytes(1 << 20))
        elif how == "copy":
            writer.add("tokenizer.json", big)
        else:
            # torch.jit.save to a path would abort the whole process here, so kernels are written through a buffer.
            writer.write_bytes("bucket_kernel.pt", torch.jit.script(torch.nn.Linear(512, 512)).save_to_buffer())
    assert artifact_digest(old) == digest
    load_artifact(old)
    assert leftovers(small_disk) == []


def test_a_file_size_limit_is_a_typed_error(tmp_path):
    """The same on any machine: the write itself fails, in a process whose files may have 64 kB."""
    code = f"""
        import os, resource, sys, torch
        from nxd_infer.errors import ArtifactSpaceError
        from nxd_infer.artifact.writer import ArtifactWriter
        from nxd_infer.runtime.updates.weights import anonymous_file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        for how in ("bytes", "safetensors"):
            try:
                with ArtifactWriter({str(tmp_path / "artifact")!r}) as writer:
                    if how == "bytes":
                        writer.write_bytes("w", bytes(1 << 20))
                    else:
                        writer.write_safetensors("w", {{"w": torch.ones(1 << 18)}})
            except ArtifactSpaceError:
                print("typed", how)
        weight = torch.ones(1 << 18)
        try:
            anonymous_file([("w", weight.dtype, weight.shape)], lambda name: weight)
        except ArtifactSpaceError as error:
            print("typed", str(error)[:15])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.splitlines() == ["typed bytes", "typed safetensors", "typed the new weights"], done.stderr
    assert os.listdir(tmp_path) == []


WRITES_FOREVER = """
    import sys, time
    from nxd_infer.artifact.writer import ArtifactWriter
    with ArtifactWriter(sys.argv[1]) as writer:
        writer.write_bytes("weights/rank_00.safetensors", bytes(1000))
        print("writing", flush=True)
        time.sleep(600)
"""


def test_a_killed_writer_leaves_nothing_loadable_and_the_next_tidies_up(tmp_path, monkeypatch):
    target = tmp_path / "artifact"
    command = [sys.executable, "-c", textwrap.dedent(WRITES_FOREVER), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        monkeypatch.setattr("nxd_infer.artifact.writer._YOUNG", 0.0)
        with ArtifactWriter(target):
            assert len(leftovers(tmp_path)) == 2  # a writer at work is not disturbed
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert not target.exists()
    assert len(leftovers(tmp_path)) == 1
    with pytest.raises(ArtifactError, match="not an artifact"):
        load_artifact(tmp_path / leftovers(tmp_path)[0])
    time.sleep(0.01)
    load_artifact(toy.build(target))
    assert leftovers(tmp_path) == []


def test_ctrl_c_while_saving_leaves_nothing(tmp_path):
    target = tmp_path / "artifact"
    command = [sys.executable, "-c", textwrap.dedent(WRITES_FOREVER), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert os.listdir(tmp_path) == []


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
