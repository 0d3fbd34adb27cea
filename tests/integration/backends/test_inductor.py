"""The inductor backend: what is compiled, how often, what it computes, and that no value of a weight gets into it.

Every compile takes many seconds, so that all tests look at the same two compiled artifacts; compiles are counted in
a copy of the cache that they left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer import backends, native
from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.backends.compile import pool as compile_pool
from nxd_infer.backends.compile.pool import compile_graphs
from nxd_infer.errors import (
    ArtifactCorruptError,
    ArtifactVersionError,
    InputMismatchError,
    RankFailedError,
    TraceError,
    WeightSchemaError,
)
from nxd_infer.ops import packed
from nxd_infer.runtime.load import load_artifact
from nxd_infer.util.machine import cpu_features
from tests.support import traced_models as models
from tests.support.backends import compiled
from tests.support.graph.exporting import load
from tests.support.needs import needs_inductor

inductor = backends.get("inductor")
pytestmark = needs_inductor


# --- one graph of all that compiled code must get right -----------------------------------------------


@pytest.fixture(scope="module", params=["eager", "inductor"])
def traced(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "inductor":
        with nxd.trace.parallel_model_load(compiled.compiled_everything() / "artifact") as model:
            yield model
        return
    example = tuple(compiled.everything_steps(1)[0])
    options = {"tp_degree": 1, "backend": "eager", "compiler_args": {"nxd_packed": 1}}
    with compiled.trace(compiled.everything, example, compiled.everything_weights, **options) as model:
        yield model


def flat(outputs: dict[str, Any]) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(outputs)


@pytest.mark.smoke
def test_it_computes_what_pytorch_does_with_any_number_of_threads(traced: Any) -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            traced.reset_states()
            found.append([flat(traced(*step)) for step in compiled.everything_steps()])
    finally:
        torch.set_num_threads(before)
    plain = compiled.everything()
    with torch.no_grad():
        for number, step in enumerate(compiled.everything_steps()):
            for one, want in zip(found[0][number], flat(plain(*step)), strict=True):
                torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5)
            for others in found[1:]:
                assert all(map(torch.equal, found[0][number], others[number]))
    (program,) = traced.artifact.path.rglob("program.json")
    for name in ("packed_linears", "cache_attention", "sample", "sample_adjusted", "remember_tokens"):
        assert re.search(rf"nxd_[0-9a-f]{{8}}\.{name}\.default", program.read_text()), name


def test_compiled_code_calls_the_operators_past_torch_and_shares_loops_among_threads() -> None:
    work = compiled.compiled_everything() / "work"
    (wrapper,) = (file.read_text() for file in work.rglob("*.wrapper.cpp"))
    for name in ("packed_linears", "cache_attention"):
        assert wrapper.count(f"(aoti_torch_cpu_{name}(") == 2, name
    # 77 stands in the caches' shape alone: nothing but a check of the inputs may name it.
    naming = [line for line in wrapper.splitlines() if "77L" in line]
    assert naming and all("assert_size_stride(arg" in line for line in naming)
    code = "".join(file.read_text() for file in work.rglob("*.cpp"))
    assert "#pragma omp parallel" in code, "what is large and sums nothing is shared"
    assert "AOTI_TORCH_CHECK" in code


def test_an_index_out_of_range_is_an_error_and_not_the_end_of_the_rank() -> None:
    """However many threads share the loops around it."""
    (step,) = compiled.everything_steps(1)
    artifact = compiled.compiled_everything() / "artifact"
    with nxd.trace.parallel_model_load(artifact, in_process=False, threads_per_rank=2) as model:
        model(*step)
        step[4][200] = 10
        with pytest.raises(RankFailedError, match="index out of bounds"):
            model(*step)


class Runtime:
    context = None
    threads = 1

    def library(self, content_hash: str) -> Any:
        return native.load()


def test_decisions_5_7_and_19_values_come_from_the_tensors_given_at_load() -> None:
    """Compiled on ones and zeros, run on others: uniform weights are not folded, small constants are not baked in."""
    artifact = load_artifact(compiled.compiled_everything() / "artifact")
    ((digest, spec),) = artifact.manifest.graphs.items()
    path, generator = artifact.graph_dir(digest), torch.Generator().manual_seed(1)
    weights = {w.name: torch.randn(w.shape, generator=generator) for w in artifact.manifest.weights}
    for weight in artifact.manifest.weights:
        if weight.encoding:
            weights[weight.name] = packed.pack(weights[weight.name])
    assert {w.kind for w in artifact.manifest.weights} == {"parameter", "buffer", "constant"}

    def states() -> dict[str, Tensor]:
        return {state.name: torch.zeros(state.shape, dtype=state.torch_dtype) for state in artifact.manifest.states}

    runtime: Any = Runtime()
    run = load("inductor", path, spec, states(), weights, runtime)
    reference = load("eager", path, spec, states(), weights, runtime)

    def equal(step: list[Tensor]) -> bool:
        found, wanted = run(step), reference(step)
        return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found, wanted, strict=True))

    steps = compiled.everything_steps()
    assert all(map(equal, steps))
    weights["offset"].add_(5)  # a change inside a tensor is seen at once
    assert equal(steps[0])
    for executable in (run, reference):
        executable.update_weights({"norm.weight": torch.zeros(6)})
    assert equal(steps[0])
    with pytest.raises(InputMismatchError, match=r"'x' has shape \[1, 6\]"):
        run([steps[0][0][:1], *steps[0][1:]])
    with pytest.raises(WeightSchemaError, match="has shape"):
        load("inductor", path, spec, states(), {**weights, "norm.bias": torch.zeros(5)}, runtime)


# --- the graph of two ranks: how often it is compiled, and what refuses to run it ---------------------


@pytest.fixture(scope="module")
def net() -> Path:
    return compiled.compiled_net()


@pytest.fixture
def cache(net: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of what the compile left in the cache, to be looked at and damaged."""
    copy = compiled.copy_of_cache(net, tmp_path / "cache")
    with compiled.cache_at(copy):
        yield copy


def graph_of(net: Path) -> tuple[str, Path]:
    artifact = load_artifact(net / "artifact")
    (digest,) = artifact.manifest.graphs
    return digest, artifact.graph_dir(digest)


@pytest.mark.smoke
def test_ranks_share_one_graph_that_is_compiled_once_and_never_again(net: Path, cache: Path, tmp_path: Path) -> None:
    report = json.loads((net / "report.json").read_text())
    assert (report["graphs"], report["compiled"]) == (1, 1)
    manifest = load_artifact(net / "artifact").manifest
    (graphs,) = (bucket.graphs for bucket in manifest.buckets)
    assert graphs == list(manifest.graphs) * 2
    assert manifest.graphs[graphs[0]].collectives == [
        "all_reduce(tp, sum, 2)",
        "all_reduce(tp, sum, 2)",
        "all_gather(tp, 1, 2)",
    ]
    # Words for the Neuron compiler make no other graph, and the directory is there though nothing compiles.
    words = {"compiler_args": ["--model-type=transformer", "-O1"], "compiler_workdir": tmp_path / "some" / "where"}
    with compiled.trace_net(checkpoint_loader_callable=lambda: models.state_dict(seed=3), **words) as again:
        assert (again.trace_report["compiled"], again.trace_report["cached"]) == (0, 1)
        assert again.buckets[0].graphs == graphs
        assert again.trace_report["ignored_compiler_args"] == words["compiler_args"]
        assert words["compiler_workdir"].is_dir()
        steps = [(torch.tensor([i, i + 3]), torch.tensor([i, (2 * i) % models.LENGTH])) for i in range(4)]
        for (tokens, position), want in zip(steps, models.expected(steps, seed=3), strict=True):
            assert (again(tokens, position)[0] - want).abs().max() <= 1e-5 * want.abs().max()


def test_decisions_13_and_14_the_package_is_unpacked_and_says_what_it_needs(net: Path) -> None:
    _, graph = graph_of(net)
    names = {path.relative_to(graph).as_posix() for path in graph.rglob("*") if path.is_file()}
    code = "inductor/data/aotinductor/model/model.wrapper"
    assert {"graph.json", "ir.json", "program.json", f"{code}.so"} <= names
    manifest = load_artifact(net / "artifact").manifest
    target, versions = manifest.target, dict(manifest.versions)
    assert target["march"].startswith(("x86-64", "native")) and target["arch"] == os.uname().machine
    assert set(target["cpu_features"]) <= cpu_features()
    assert list((net / "work").glob("nxd-compile-*/inductor/*")), "what the compiler wrote stays where it was asked to"
    assert not list((net / "work" / "inductor").iterdir()), "and not where others could have put something"
    inductor.check_target(target, versions)
    with pytest.raises(ArtifactVersionError, match="for a CPU with made_up, which this one lacks"):
        inductor.check_target({**target, "cpu_features": ["made_up"]}, versions)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda code: shutil.rmtree(code.parents[3]), "holds no compiled graph"),
        (lambda code: (code.parent / "more.so").write_bytes(b"code"), r"'more.so'.*remove"),
    ],
    ids=["its code is missing", "a stray file"],
)
def test_a_graph_that_is_not_as_it_was_written_is_refused(net: Path, tmp_path: Path, damage: Any, message: str) -> None:
    digest, graph = graph_of(net)
    copy = shutil.copytree(graph, tmp_path / digest)
    damage(next(copy.rglob("*.so")))
    spec = load_artifact(net / "artifact").manifest.graphs[digest]
    with pytest.raises(ArtifactCorruptError, match=message):
        load("inductor", copy, spec, {}, {}, Runtime())


def test_decision_16_a_cache_entry_that_is_damaged_or_anothers_is_not_used(
    net: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digest, graph), compiler, out = graph_of(net), inductor.compiler(), tmp_path / "out"
    assert compiler and not compile_cache.fetch(digest, out, f"{compiler}.1")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # which costs no entry
        patch.setattr(shutil, "copyfile", full)
        assert not compile_cache.fetch(digest, out, compiler)
    (entry,) = (path for path in (cache / "graphs").iterdir() if path.is_dir())
    (code,) = entry.rglob("*.so")
    data = bytearray(code.read_bytes())
    data[len(data) // 2] ^= 1
    code.write_bytes(data)
    assert not compile_cache.fetch(digest, out, compiler)
    assert not out.exists() and not entry.exists()
    compile_cache.store(digest, graph, compiler)
    assert compile_cache.fetch(digest, out, compiler) and next(out.rglob("*.so")).exists()


def test_a_cache_that_cannot_be_used_is_done_without(
    net: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digest, graph), compiler = graph_of(net), inductor.compiler()
    monkeypatch.setattr(compile_cache, "WAIT", 0.2)
    with open(cache / "graphs" / ".lock", "a") as lock:  # a process that was stopped amid tidying up
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not compile_cache.fetch(digest, tmp_path / "out", compiler)
        compile_cache.prune()
    monkeypatch.setenv("NXD_INFER_CACHE", "/proc/no/such/place")
    assert not compile_cache.fetch(digest, tmp_path / "out", compiler)
    compile_cache.store(digest, graph, compiler)


# --- failures of the compile processes ----------------------------------------------------------------


def test_an_error_is_told_whatever_is_open_and_wherever_files_cannot_be_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers arrive on descriptors above 1023, too, and a workdir that takes nothing hides no error."""
    temporary, workdir = tmp_path / "tmp", tmp_path / "work"
    temporary.mkdir()
    workdir.touch()  # what is moved there fails, as on a full disk
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        with pytest.raises(TraceError, match="cannot be read"):
            compile_graphs("inductor", [tmp_path / "nothing"], {}, workdir=workdir, timeout=600)
    said = "compiler_workdir: what the compiler wrote cannot be moved to"
    with pytest.raises(TraceError, match=said), compile_pool.workplace(workdir):
        pass
    assert not list(temporary.glob("nxd-compile-*"))


def test_a_compiler_that_fails_or_takes_too_long_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, own, out = tmp_path / "broken-compiler", tmp_path / "temporary", tmp_path / "out"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exec g++ --version;; esac\n'
        "echo 'broken-compiler: no space for jokes' >&2; exit 7\n"
    )
    compiler.chmod(0o755)
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))  # other processes compile in the common one
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")  # else what was compiled before is taken
    late = {"backend": "inductor", "compile_timeout": 0.01}
    eager = compiled.eager_net()
    for made in (
        lambda: nxd.trace.parallel_model_recompile(eager, out, **late),
        lambda: compiled.trace_net(artifact_dir=out, **late),
    ):
        with pytest.raises(TraceError, match=r"longer than 0.01 s; raise compile_timeout"):
            made()
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(TraceError, match=r"compiling graph .* failed") as caught:
        nxd.trace.parallel_model_recompile(eager, out, backend="inductor")
    assert "jokes" in str(caught.value) or "jokes" in caught.value.remote_traceback
    assert not out.exists() and not list(own.glob("nxd-*compile-*"))
