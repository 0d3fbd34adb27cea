"""RankModel: the ranks of an artifact for a process without torch, and what it knows of types in torch's place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from nxd_infer.errors import (
    ArtifactCorruptError,
    InputMismatchError,
    RankDiedError,
)
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.runtime.rank_model import RankModel
from tests.support import toy_artifacts as toy
from tests.support.processes import wait_until


def test_arrays_give_what_tensors_give_in_a_process_without_torch(artifacts, tmp_path):
    """In a process of its own: this one has torch. A closed model starts again, with states as traced."""
    path = artifacts[1]  # two ranks would look for the native library, by torch's version
    x = torch.randn(4, 8, toy.HIDDEN)
    ids = torch.tensor([0, 1, 2, 3])
    with TensorParallelModel(load_artifact(path), in_process=False, start_timeout=600) as model:
        want = model.run_bucket("b4_s8", {"x": x, "ids": ids})
    np.savez(tmp_path / "in.npz", x=x.numpy(), ids=ids.numpy())
    code = f"""
import sys
import numpy as np
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel
artifact = load_artifact({str(path)!r}, later=True)
with RankModel(artifact, start_timeout=600, before_load=artifact.verify) as model:
    given = dict(np.load({str(tmp_path / "in.npz")!r}))
    model.run_bucket("b4_s8", {{"x": given["x"]}})
    model.restart()
    np.savez({str(tmp_path / "out.npz")!r}, **model.run_bucket("b4_s8", given))
    assert [rank.alive for rank in model.health()] == [True]
from nxd_infer.util.machine import torch_version
assert torch_version() == {torch.__version__!r} and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "out.npz"))
    assert list(found) == list(want)
    assert all((found[name] == want[name].numpy()).all() for name in want)


def test_a_tensor_parallel_model_takes_arrays_where_ranks_are_processes(artifacts):
    """They give what tensors give, as arrays; a mixture is refused, and so are arrays in this process."""
    path = artifacts[1]
    inputs = {"x": torch.randn(4, 8, toy.HIDDEN), "ids": torch.tensor([0, 1, 2, 3])}
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    with TensorParallelModel(load_artifact(path), in_process=False, start_timeout=600) as model:
        assert model.arrays
        want = model.run_bucket("b4_s8", inputs)
        model.reset_states()
        found = model.run_bucket("b4_s8", arrays)
        assert list(found) == list(want) and all(isinstance(array, np.ndarray) for array in found.values())
        assert all((found[name] == want[name].numpy()).all() for name in want)
        with pytest.raises(InputMismatchError, match="'ids' is a Tensor, expected a numpy"):
            model.run_bucket("b4_s8", {**arrays, "ids": inputs["ids"]})
    with TensorParallelModel(load_artifact(path)) as model:
        assert not model.arrays
        with pytest.raises(InputMismatchError):
            model.run_bucket("b4_s8", arrays)


def test_no_rank_reads_the_artifact_before_it_is_verified(path, tmp_path):
    """They run meanwhile, and are gone when the files turn out to be damaged; so is what they would have loaded."""
    copy = Path(shutil.copytree(path, tmp_path / "copy"))
    (graph, *_) = sorted((copy / "graphs").glob("*/program.json"))
    graph.write_text("x" * graph.stat().st_size)
    artifact = load_artifact(copy, later=True)
    seen: list[list[str]] = []

    def verify() -> None:
        wait_until(lambda: all(rank.pid for rank in model.health()))
        pids = [rank.pid for rank in model.health()]
        wait_until(lambda: all("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in pids))
        time.sleep(0.5)  # by then a rank that did not wait would have failed on the damaged graph
        seen.append([rank.state for rank in model.health()])
        artifact.verify()

    model = RankModel(artifact, start_timeout=600, before_load=verify)
    for _ in range(2):  # a start that failed verifies again
        with pytest.raises(ArtifactCorruptError, match=r"graphs/.*/program\.json of .* is altered"):
            model.start()
        assert model.health() == []
    assert seen == [["running", "running"]] * 2


def test_a_rank_that_dies_before_it_may_load_is_what_is_raised(path):
    def kill() -> None:
        wait_until(lambda: model.health()[1].pid)
        pid = model.health()[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(rank.alive for rank in model.health()))

    model = RankModel(load_artifact(path), start_timeout=600, before_load=kill)
    with pytest.raises(RankDiedError, match="rank 1 of 2 was ended by SIGKILL"):
        model.start()
