"""Models on a Neuron machine of stand-ins: traced, cross-compiled, placed, probed, refused."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer.artifact.reader import LoadedArtifact
from nxd_infer.backends.base import RankGraph
from nxd_infer.backends.hlo import base
from nxd_infer.backends.neuron import backend as neuron
from nxd_infer.backends.neuron import cores, runtime, sdk
from nxd_infer.backends.neuron.executable import PROBE, NeuronExecutable
from nxd_infer.context import LOCAL
from nxd_infer.errors import (
    ArtifactBackendError,
    ArtifactVersionError,
    BackendUnavailableError,
    InputMismatchError,
    RankFailedError,
    TraceError,
)
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import parallel_model_load, parallel_model_save
from nxd_infer.runtime.rank_process.rank import Runtime
from nxd_infer.trace import BucketModelConfig
from tests.support import tiny_models
from tests.support import traced_models as models
from tests.support.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, TARGET, neuron_machine

pytestmark = pytest.mark.skipif(not HAS_XLA, reason=NEEDS_XLA)
stand_in = pytest.mark.skipif(REAL, reason="it needs a machine that can be described as one likes")
STEP = (torch.tensor([3, 20]), torch.tensor([0, 0]))
ROOT = Path(__file__).parents[3]
FILES = {"neuron.hlo", "graph.neff", "neuronx-cc.log", "neuronx-cc.txt"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """``models.net`` at degree 2, compiled on a machine that has no device."""
    root = tmp_path_factory.mktemp("traced")
    with neuron_machine(root / "machine", "m7i.large", 0):
        model = nxd.trace.parallel_model_trace(
            models.net,
            models.inputs(),
            tp_degree=2,
            backend="neuron",
            inline_weights_to_neff=False,
            compiler_args=f"--target {TARGET} --model-type=transformer -O1",
            compiler_workdir=root / "work",
        )
        parallel_model_save(model, root / "artifact")
        yield root / "artifact"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``machine(instance, devices)``: be on such a machine until the test ends."""
    import contextlib

    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "cache"))
    with contextlib.ExitStack() as here:
        yield lambda *described: here.enter_context(neuron_machine(tmp_path / "machine", *described))


# --- compiled for another machine ---------------------------------------------------------------------


def kept(work: Path) -> dict[str, set[str]]:
    return {folder.name: {file.name for file in folder.iterdir()} for folder in work.glob("bucket_0-*")}


@stand_in
def test_a_machine_without_a_device_compiles_and_keeps_the_files_also_from_the_cache(
    tmp_path: Path, saved: Path
) -> None:
    target = load_artifact(saved, runs_here=False).manifest.target
    assert target == {"platform": "inf2", "compiler": "2.26.6360.0+fake", "revision": base.REVISION}
    assert [*kept(saved.parent / "work").values()] == [FILES]
    with neuron_machine(tmp_path / "machine", "m7i.large", 0):
        again = nxd.trace.parallel_model_trace(
            models.net,
            models.inputs(),
            tp_degree=2,
            backend="neuron",
            compiler_args=["--target", "inf2", "--model-type=transformer", "-O1"],
            compiler_workdir=tmp_path / "work",
        )
    assert again.trace_report["compiled"] == 0 and again.trace_report["ignored_compiler_args"] == []
    assert [*kept(tmp_path / "work").values()] == [FILES]
    again.close()


@stand_in
def test_a_compiler_that_fails_leaves_its_files_for_a_report(machine: Any, tmp_path: Path) -> None:
    machine("m7i.large", 0)
    with pytest.raises(
        TraceError, match=r"ended with status 2: see what it said, and keep its files with compiler_wor"
    ):
        nxd.trace.parallel_model_trace(
            models.net,
            models.inputs(),
            tp_degree=2,
            backend="neuron",
            compiler_args="--target inf2 --speed=3",
            compiler_workdir=tmp_path / "work",
        )
    assert [*kept(tmp_path / "work").values()] == [FILES - {"graph.neff"}]
    (log,) = (tmp_path / "work").glob("bucket_0-*/neuronx-cc.log")
    assert "unrecognized arguments: --speed=3" in log.read_text()


@stand_in
def test_the_command_line_compiles_for_another_machine(tmp_path: Path) -> None:
    """A Llama for Trn1, where there is neither a device nor torch_neuronx's runtime."""
    model, out = tiny_models.write_tiny("llama", tmp_path / "model", num_hidden_layers=1), tmp_path / "artifact"
    line = [sys.executable, "-m", "nxd_infer", "trace", str(model), "--out", str(out), "--tp", "2", "--max-len", "32"]
    line += ["--batch-sizes", "1", "--prompt-buckets", "8", "--dtype", "float32", "--backend", "neuron"]
    with neuron_machine(tmp_path / "machine", "m7i.large", 0):
        refused = subprocess.run(line, capture_output=True, text=True, timeout=420, cwd=ROOT)
        assert refused.returncode != 0
        assert "say for which one to compile, by --target inf2 or --target trn1" in " ".join(refused.stderr.split())
        line += ["--target", "trn1", "--compiler-args", "--model-type=transformer", "--workdir", str(tmp_path / "work")]
        done = subprocess.run(line, capture_output=True, text=True, timeout=420, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    assert load_artifact(out, runs_here=False).manifest.target["platform"] == "trn1"
    commands = [file.read_text() for file in (tmp_path / "work").glob("*/neuronx-cc.txt")]
    assert commands and all("--target trn1 --auto-cast=none --model-type=transformer" in line for line in commands)


# --- where it cannot run ------------------------------------------------------------------------------


NO_DEVICE = r"cannot run here: there is no Neuron device \(/dev/neuron0"
OF_TESTS = r"2.26.6360.0\+fake, a stand-in of tests, and runs on no"
OF_INF2 = r"for inf2 and this trn1.2xlarge is trn1: trace it again"


@stand_in
@pytest.mark.parametrize(
    ("described", "version", "error", "text"),
    [
        (("m7i.large", 0), "2.9.0.2.15+fake", ArtifactBackendError, NO_DEVICE),
        (("inf2.xlarge", 1), "2.9.0.2.15", ArtifactVersionError, OF_TESTS),
        (("trn1.2xlarge", 1), "2.9.0.2.15+fake", ArtifactVersionError, OF_INF2),
    ],
)
def test_where_it_cannot_run_one_sentence_says_why(
    saved: Path, machine: Any, monkeypatch: pytest.MonkeyPatch, described: Any, version: str, error: Any, text: str
) -> None:
    machine(*described)
    monkeypatch.setattr(sdk, "installed", lambda: version)
    with pytest.raises(error, match=text):
        load_artifact(saved)


@stand_in
def test_too_few_cores_and_cores_in_use(saved: Path, machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("inf2.xlarge", 1)
    with monkeypatch.context() as patch:
        patch.setenv(cores.VISIBLE, "1")
        with pytest.raises(RankFailedError) as caught, parallel_model_load(saved) as model:
            model(*STEP)
        assert "needs 2 cores and this inf2.xlarge has 2 of which NEURON_RT_VISIBLE_CORES leaves 1" in str(caught.value)
        assert caught.value.foreseen
    with parallel_model_load(saved) as first:
        assert torch.allclose(first(*STEP)[0], models.expected([STEP])[0], atol=1e-5)
        with pytest.raises(RankFailedError, match="in use by other processes"), parallel_model_load(saved) as second:
            second(*STEP)
    with parallel_model_load(saved) as again:
        again(*STEP)


# --- inside the process of the ranks ------------------------------------------------------------------


@pytest.fixture
def load(saved: Path, machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``load()``: the graph of both ranks, in this process, which keeps its cores until it ends."""
    machine()
    artifact: LoadedArtifact = load_artifact(saved)
    manifest = artifact.manifest
    own = Runtime(LOCAL, 1, artifact)
    made: list[NeuronExecutable] = []

    def loaded() -> tuple[NeuronExecutable, list[Any]]:
        (digest,) = manifest.graphs
        places = [neuron.BACKEND.place(manifest, artifact.weight_file(rank), own) for rank in range(2)]
        ranks = [
            RankGraph(artifact.graph_dir(digest), manifest.graphs[digest], place.states, place.weights)
            for place in places
        ]
        executable: Any = neuron.BACKEND.load(ranks, own)
        made.append(executable)
        return executable, places

    yield loaded
    for each in made:
        each.close()
    for claim in neuron._claims:
        claim.close()
    neuron._claims.clear()


def test_a_probe_leaves_states_as_they_were(load: Any) -> None:
    executable, places = load()
    assert all(not place.states["cache"].on_host().any() for place in places)
    assert torch.allclose(executable(STEP)[0], models.expected([STEP])[0], atol=1e-5)
    assert places[0].states["cache"].on_host().any()
    assert torch.equal(places[0].states["cache"].on_host(), places[1].states["cache"].on_host())


def test_answers_of_zeros_alone_are_an_error(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is seen in the field: weights are matched by name, and one that does not arrive is not missed."""
    right = runtime.initialize

    def lost(model: Any, states: Any, weights: list[Mapping[str, Tensor]]) -> None:
        right(model, states, [{f"model.{name}": value for name, value in rank.items()} for rank in weights])

    monkeypatch.setattr(runtime, "initialize", lost)
    with pytest.raises(
        BackendUnavailableError, match=r"answers a probe with zeros alone.*load the model again, or set"
    ):
        load()
    monkeypatch.setenv(PROBE, "0")
    executable, _ = load()
    assert not executable(STEP)[0].any()


def test_a_program_that_was_never_initialised_is_an_error(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = runtime.program

    def mocked(*arguments: Any) -> Any:
        made = right(*arguments)
        vars(made)["initialize"] = lambda *_: None
        return made

    monkeypatch.setattr(runtime, "program", mocked)
    with pytest.raises(BackendUnavailableError, match="did not initialise the model: see NEURON_RT_LOG_LEVEL=INFO"):
        load()


def test_whole_numbers_beyond_32_bits_are_refused(load: Any) -> None:
    executable, _ = load()
    for number in (2**40, -(2**63)):
        with pytest.raises(InputMismatchError, match=rf"input 'tokens' holds the number {number}, .* in 32 bits"):
            executable((torch.tensor([number, 0]), STEP[1]))


# --- the documented call for one device ---------------------------------------------------------------


@pytest.mark.parametrize("whose", ["ours", "torch_neuronx"])
def test_bucket_model_trace_with_shared_states_and_a_kernel(machine: Any, whose: str, tmp_path: Path) -> None:
    machine("inf2.xlarge", 1)
    theirs: Any = importlib.import_module("torch_neuronx").BucketModelConfig
    config = (BucketModelConfig if whose == "ours" else theirs)(
        models.by_length,
        shared_state_buffer=[torch.arange(4.0).reshape(1, 4)],
        shared_state_buffer_preprocessor=models.window_preprocessor,
        func_kwargs=[{"length": 2}, {"length": 4}],
    )
    examples = [(torch.zeros(1, 2),), (torch.zeros(1, 4),)]
    work, arguments = tmp_path / "work", f"--target {TARGET} --model-type=transformer"
    with nxd.trace.bucket_model_trace(models.window, examples, config, work, arguments, backend="neuron") as model:
        assert model.tp_degree == 1 and model.manifest.states[0].shape == [1, 4]
        assert model(torch.tensor([[10.0, 20.0]]))[0] == 2 + 10 + 3 + 20
        assert model(torch.zeros(1, 4))[0] == 0 + 1 + 12 + 23
    folders = sorted(work.glob("bucket_*-*"))
    assert [folder.name.partition("-")[0] for folder in folders] == ["bucket_0", "bucket_1"]
    for folder in folders:
        assert {file.name for file in folder.iterdir()} == FILES
        assert f"--target {TARGET} --auto-cast=none --model-type=transformer" in (folder / "neuronx-cc.txt").read_text()


def test_a_model_that_reads_a_state_before_it_writes_is_refused(machine: Any) -> None:
    machine("inf2.xlarge", 1)
    with pytest.raises(
        TraceError, match=r"read after write on aliased input/output buffer.*read the state after it was"
    ):
        nxd.trace.parallel_model_trace(models.reads_first, (torch.zeros(2),), backend="neuron")
