"""RankModel: the ranks of an artifact for a process without torch, and what it knows of types in torch's place."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from nxd_infer.artifact.manifest import BucketSpec, InputSpec, Manifest, OutputSpec
from nxd_infer.errors import (
    ArtifactCorruptError,
    BucketError,
    InputMismatchError,
    InputRangeError,
    ModelClosedError,
    RankDiedError,
)
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel
from nxd_infer.runtime.rank_model import RankModel, array_check, takes_arrays
from nxd_infer.util.dtypes import ITEM_BYTES, LARGEST_FLOAT, SAFETENSORS_DTYPES
from nxd_infer.util.machine import torch_version
from tests.support import toy_artifacts as toy
from tests.support.processes import wait_until


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return toy.build(tmp_path_factory.mktemp("ranks") / "artifact")


def test_arrays_give_what_tensors_give_in_a_process_without_torch(tmp_path):
    """In a process of its own: this one has torch. A closed model starts again, with states as traced."""
    path = toy.build(tmp_path / "artifact", degree=1)  # two ranks would look for the native library, by torch's version
    x = torch.randn(4, 8, toy.HIDDEN)
    ids = torch.tensor([0, 1, 2, 3])
    with TensorParallelModel(load_artifact(path), in_process=False, start_timeout=600) as model:
        want = model.run_bucket("b4_s8", {"x": x, "ids": ids})
    np.savez(tmp_path / "in.npz", x=x.numpy(), ids=ids.numpy())
    code = f"""
import sys
import time
import numpy as np
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.rank_model import RankModel
artifact, verified = load_artifact({str(path)!r}, later=True), []

def verify():
    artifact.verify()
    verified.append(time.monotonic())

begin = time.monotonic()
with RankModel(artifact, start_timeout=600, before_load=verify) as model:
    assert 0 < model.bounds.least_load <= time.monotonic() - begin and verified
    given = dict(np.load({str(tmp_path / "in.npz")!r}))
    model.run_bucket("b4_s8", {{"x": given["x"]}})
    model.restart()
    np.savez({str(tmp_path / "out.npz")!r}, **model.run_bucket("b4_s8", given))
    assert [rank.alive for rank in model.health()] == [True]
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = dict(np.load(tmp_path / "out.npz"))
    assert list(found) == list(want)
    assert all((found[name] == want[name].numpy()).all() for name in want)


def test_a_tensor_parallel_model_takes_arrays_where_ranks_are_processes(tmp_path):
    """They give what tensors give, as arrays; a mixture is refused, and so are arrays in this process."""
    path = toy.build(tmp_path / "artifact", degree=1)
    inputs = {"x": torch.randn(4, 8, toy.HIDDEN), "ids": torch.tensor([0, 1, 2, 3])}
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    with TensorParallelModel(load_artifact(path), in_process=False, start_timeout=600) as model:
        assert model.arrays
        want = model.run_bucket("b4_s8", inputs)
        model.reset_states()
        found = model.run_bucket("b4_s8", arrays)
        assert list(found) == list(want) and all(isinstance(array, np.ndarray) for array in found.values())
        assert all((found[name] == want[name].numpy()).all() for name in want)
        with pytest.raises(InputMismatchError, match="'x' is missing and has no default"):
            model.run_bucket("b4_s8", {"ids": arrays["ids"], "x": None})
        without = []
        for ids in (None, np.zeros(4, np.int64)):  # None is its default
            model.reset_states()
            without.append(model.run_bucket("b4_s8", {**arrays, "ids": ids}))
        assert all((without[0][name] == without[1][name]).all() for name in want)
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
        time.sleep(1.0)  # by then a rank that did not wait would have failed on the damaged graph
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


def test_arrays_that_do_not_fit_are_refused():
    bucket = BucketSpec(
        name="b",
        inputs=[
            InputSpec.of("ids", torch.zeros(2, 3, dtype=torch.int64), minimum=0, maximum=9),
            InputSpec.of("mask", torch.zeros(2, 3), default=1.0),
        ],
        outputs=[],
        graphs=["g"],
    )
    ids = np.zeros((2, 3), np.int64)
    array_check(bucket)({"ids": ids})
    array_check(bucket)({"ids": ids, "mask": np.ones((2, 3), np.float32)})
    for inputs, words in (
        ({}, "input 'ids' is missing and has no default"),
        ({"ids": ids, "more": ids}, "there is no input 'more'"),
        ({"ids": ids.tolist()}, "'ids' is a list, expected a numpy.ndarray"),
        ({"ids": torch.from_numpy(ids)}, "'ids' is a Tensor, expected a numpy.ndarray"),
        ({"ids": ids[:1]}, r"'ids' is int64\[1, 3\], bucket 'b' takes int64\[2, 3\]"),
        ({"ids": ids.astype(np.int32)}, r"'ids' is int32\[2, 3\], bucket 'b' takes int64"),
    ):
        with pytest.raises(InputMismatchError, match=words):
            array_check(bucket)(inputs)
    for value in (-1, 10):
        with pytest.raises(InputRangeError, match=f"holds the value {value}; it must be 0 to 9"):
            array_check(bucket)({"ids": np.where(np.eye(2, 3) > 0, value, ids)})


def test_a_model_that_was_closed_or_has_no_such_bucket_says_so(path):
    model = RankModel(load_artifact(path), start_timeout=600)
    with pytest.raises(BucketError, match=r"no bucket 'b9'[^$]*b2_s4  x: float32"):
        model.run_bucket("b9", {})
    with pytest.raises(InputMismatchError, match="timeout must be a number of seconds above 0, got 0"):
        model.run_bucket("b2_s4", {}, timeout=0)
    model.close()
    with pytest.raises(ModelClosedError):
        model.start()


def test_arrays_need_types_that_numpy_has(path):
    manifest = load_artifact(path).manifest
    assert takes_arrays(manifest)
    odd = BucketSpec(
        name="odd", inputs=[], outputs=[OutputSpec.of("y", torch.zeros(1, dtype=torch.bfloat16))], graphs=[]
    )
    assert not takes_arrays(Manifest(backend="eager", tp_degree=1, buckets=[*manifest.buckets, odd], graphs={}))


def test_types_are_known_as_torch_knows_them():
    for name, size in ITEM_BYTES.items():
        dtype = getattr(torch, name)
        assert dtype.itemsize == size
        if dtype.is_floating_point:
            assert LARGEST_FLOAT[name] == torch.finfo(dtype).max == -torch.finfo(dtype).min
        elif dtype != torch.bool:
            spec = {"name": "x", "dtype": name, "shape": [1], "stride": [1]}
            info = torch.iinfo(dtype)
            for value in (info.min, info.max):
                InputSpec(**spec, default=None, minimum=value, maximum=value)
            with pytest.raises(ValueError, match=f"which holds {info.min} to {info.max}"):
                InputSpec(**spec, minimum=info.max + 1)
    assert LARGEST_FLOAT.keys() == {name for name in ITEM_BYTES if getattr(torch, name).is_floating_point}
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in SAFETENSORS_DTYPES.values())


def test_the_version_of_torch_is_known_without_it():
    code = "import sys\nfrom nxd_infer.util.machine import torch_version\nprint(torch_version())"
    code += "\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == torch.__version__


def test_the_version_of_torch_is_known_while_another_thread_imports_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert torch_version() == torch.__version__
