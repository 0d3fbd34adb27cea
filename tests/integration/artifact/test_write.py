"""Artifacts whose writer is killed, interrupted or out of space: whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nxd_infer.artifact.writer import ArtifactWriter
from nxd_infer.errors import ArtifactError
from nxd_infer.runtime.load import load_artifact
from tests.support import toy_artifacts as toy
from tests.support.processes import wait_until


def leftovers(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_writer_that_is_ended_leaves_nothing_loadable_and_the_next_tidies_up(tmp_path, monkeypatch, number):
    target = tmp_path / "artifact"
    command = [sys.executable, "-c", WRITES_FOREVER, str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        monkeypatch.setattr("nxd_infer.artifact.writer._YOUNG", 0.0)
        with ArtifactWriter(target):
            assert len(leftovers(tmp_path)) == 2  # a writer at work is not disturbed
        process.send_signal(number)
        process.wait(60)
    if number == signal.SIGKILL:
        (left,) = leftovers(tmp_path)
        with pytest.raises(ArtifactError, match="not an artifact"):
            load_artifact(tmp_path / left)
        wait_until(lambda: time.time() > (tmp_path / left).stat().st_ctime)  # older than none is young
        load_artifact(toy.build(target))
        assert leftovers(tmp_path) == []
    else:
        assert os.listdir(tmp_path) == []
