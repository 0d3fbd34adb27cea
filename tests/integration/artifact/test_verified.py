"""A rank that starts later loads what was verified at first, or nothing: files that change under a running model."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from nxd_infer import native
from nxd_infer.artifact.manifest import weight_name
from nxd_infer.errors import RankDiedError, RankFailedError
from nxd_infer.runtime.model import parallel_model_load
from tests.support import toy_artifacts as toy
from tests.support.needs import require_native
from tests.support.processes import wait_until
from tests.support.runtime.rank_processes import X, pids_of, started

X_ONES = torch.ones(1, 1, toy.HIDDEN)


@pytest.fixture
def artifact(original, tmp_path) -> Path:
    """A copy."""
    return Path(shutil.copytree(original, tmp_path / "artifact"))


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    require_native()
    library = native.load()
    file = shutil.copy(library.path, tmp_path_factory.mktemp("library") / f"{library.hash}.so")
    return toy.build(tmp_path_factory.mktemp("verified") / "artifact", ops=[Path(file)])


def alter(file: Path) -> None:
    """Another last byte, with the size and the time of writing that the file had."""
    info = file.stat()
    with open(file, "r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        last = opened.read(1)
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def replace(file: Path) -> None:
    """Another file under the name, altered."""
    copy = file.with_name("copy")
    shutil.copy2(file, copy)
    alter(copy)
    os.rename(copy, file)


@pytest.mark.parametrize(("kind", "change"), [("weights", alter), ("graphs", replace), ("ops", alter)])
def test_a_rank_that_starts_again_refuses_a_file_that_was_altered(artifact, kind, change):
    files = sorted(file for file in (artifact / kind).rglob("*") if file.is_file())
    model = started(artifact)
    for file in files:
        change(file)
    os.kill(pids_of(model)[1], signal.SIGKILL)
    wait_until(lambda: model.failure is not None)
    assert isinstance(model.failure, RankDiedError)
    with pytest.raises(RankFailedError, match=rf"ArtifactCorruptError: {kind}/\S+ of \S+ is altered: blake3"):
        model.restart()
    model.close()


def test_a_rank_refuses_what_was_altered_between_the_verification_and_its_start(artifact):
    model = parallel_model_load(artifact)
    alter(artifact / weight_name(1))
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 raised.*rank_01\.safetensors of .* is altered"):
        model.start()


def test_files_that_were_only_touched_or_copied_are_hashed_and_taken(artifact):
    model = started(artifact)
    expected = model(X_ONES)["y"]
    for file in [file for file in artifact.rglob("*") if file.is_file()]:
        os.utime(file)
        shutil.copy2(file, file.with_name("copy"))
        os.rename(file.with_name("copy"), file)
    torch.testing.assert_close(model.restart()(X_ONES)["y"], expected, rtol=0, atol=0)
    model.close()
    alter(artifact / weight_name(1))
    with started(artifact, verify=False) as unverified:
        assert unverified.restart()(X)["count"].item() == 1
