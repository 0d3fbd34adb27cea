"""The inductor backend: what is compiled, how often, and that no value of a weight gets into it.

Every compile takes seconds, so the graphs are tiny and each is compiled once: the traces here share a cache of their
own, which starts empty, because compiles are counted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import backends
from nxd_infer.backends import registry
from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.backends.compile import pool as compile_pool
from nxd_infer.backends.compile.pool import compile_graphs
from nxd_infer.errors import (
    ArtifactCorruptError,
    ArtifactVersionError,
    InputMismatchError,
    TraceConfigError,
    TraceError,
    WeightSchemaError,
)
from nxd_infer.trace import BucketModelConfig
from nxd_infer.util.machine import cpu_features
from tests.support import traced_models as models
from tests.support.forks import kept
from tests.support.graph.exporting import load
from tests.support.needs import needs_inductor

inductor = backends.get("inductor")
pytestmark = [needs_inductor, pytest.mark.usefixtures("own_cache")]


def trace(func, example, loader, **more):
    arguments = {"tp_degree": 2, "inline_weights_to_neff": False, "checkpoint_loader_callable": loader, **more}
    return nxd.trace.parallel_model_trace(func, example, **arguments)


def compiler() -> str:
    """What the cache's entries were compiled by."""
    return registry.get("inductor").compiler()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("work")
    (workdir / "inductor").mkdir()  # as somebody would put it there who knows where compilers look for what they run
    with trace(models.net, models.inputs(), models.state_dict, compiler_workdir=workdir) as model:
        yield model, workdir


def test_the_compiled_model_equals_plain_pytorch_and_keeps_its_cache(traced):
    model, _ = traced
    model.reset_states()
    steps = [(torch.tensor([i, i + 3]), torch.tensor([i, (2 * i) % models.LENGTH])) for i in range(4)]
    for (tokens, position), want in zip(steps, models.expected(steps), strict=True):
        assert (model(tokens, position)[0] - want).abs().max() <= 1e-5 * want.abs().max()


def test_ranks_share_one_graph_that_is_compiled_once_and_never_again(traced, tmp_path):
    model, _ = traced
    assert (model.trace_report["graphs"], model.trace_report["compiled"]) == (1, 1)
    server = kept("nxd_infer.backends.cpu.compiler_imports")
    assert server is not None and server._forked, "the compiler has imported torch for itself"
    assert model.manifest.graphs[model.buckets[0].graphs[0]].collectives == [
        "all_reduce(tp, sum, 2)",
        "all_reduce(tp, sum, 2)",
        "all_gather(tp, 1, 2)",
    ]
    # Words for the Neuron compiler make no other graph, and the directory is there though nothing compiles.
    words = {"compiler_args": ["--model-type=transformer", "-O1"], "compiler_workdir": tmp_path / "some" / "where"}
    with trace(models.net, models.inputs(), lambda: models.state_dict(seed=3), **words) as again:
        assert (again.trace_report["compiled"], again.trace_report["cached"]) == (0, 1)
        assert again.buckets[0].graphs == model.buckets[0].graphs
        assert again.trace_report["ignored_compiler_args"] == words["compiler_args"]
    assert words["compiler_workdir"].is_dir()


def test_decision_16_a_damaged_cache_entry_is_not_used(traced, own_cache):
    model, _ = traced
    (entry,) = (path for path in (own_cache / "graphs").iterdir() if path.is_dir())
    (code,) = entry.rglob("*.so")
    data = bytearray(code.read_bytes())
    data[len(data) // 2] ^= 1
    code.write_bytes(data)
    target = own_cache / "fetched"
    assert not compile_cache.fetch(model.buckets[0].graphs[0], target, compiler())
    assert not target.exists() and not entry.exists()
    compile_cache.store(
        model.buckets[0].graphs[0], model.artifact.path / "graphs" / model.buckets[0].graphs[0], compiler()
    )
    assert compile_cache.fetch(model.buckets[0].graphs[0], target, compiler()) and next(target.rglob("*.so")).exists()


def test_what_another_compiler_has_compiled_is_not_used(traced, tmp_path):
    digest = traced[0].buckets[0].graphs[0]
    assert compiler() and not compile_cache.fetch(digest, tmp_path / "out", f"{compiler()}.1")


def test_a_full_disk_costs_no_cache_entry(traced, tmp_path, monkeypatch):
    digest = traced[0].buckets[0].graphs[0]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", full)
        assert not compile_cache.fetch(digest, tmp_path / "out", compiler())
    assert compile_cache.fetch(digest, tmp_path / "out", compiler())


def test_a_cache_that_cannot_be_used_is_done_without(traced, own_cache, tmp_path, monkeypatch):
    graph = traced[0].artifact.graph_dir(traced[0].buckets[0].graphs[0])
    monkeypatch.setattr(compile_cache, "WAIT", 0.2)
    with open(own_cache / "graphs" / ".lock", "a") as lock:  # a process that was stopped amid tidying up
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not compile_cache.fetch(graph.name, tmp_path / "out", compiler())
        compile_cache.prune()
    monkeypatch.setenv("NXD_INFER_CACHE", "/proc/no/such/place")
    assert not compile_cache.fetch(graph.name, tmp_path / "out", compiler())
    compile_cache.store(graph.name, graph, compiler())


def test_more_open_files_than_select_knows(tmp_path, monkeypatch):
    """Answers of compile processes arrive on descriptors above 1023, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        with pytest.raises(TraceError, match="cannot be read"):
            compile_graphs("inductor", [tmp_path / "nothing"], {}, timeout=600)


def test_a_workdir_that_takes_nothing_hides_no_error_and_leaves_nothing(tmp_path, monkeypatch):
    temporary, workdir = tmp_path / "tmp", tmp_path / "work"
    temporary.mkdir()
    workdir.touch()  # what is moved there fails, as on a full disk
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(TraceError, match="cannot be read"):
        compile_graphs("inductor", [tmp_path / "nothing"], {}, workdir=workdir, timeout=600)
    said = "compiler_workdir: what the compiler wrote cannot be moved to"
    with pytest.raises(TraceError, match=said), compile_pool.workplace(workdir):
        pass
    assert not list(temporary.glob("nxd-compile-*"))


def test_a_stray_file_among_the_code_is_refused(traced, tmp_path):
    model, _ = traced
    digest = model.buckets[0].graphs[0]
    copy = tmp_path / digest
    shutil.copytree(model.artifact.graph_dir(digest), copy)
    (next(copy.rglob("*.so")).parent / "more.so").write_bytes(b"code")

    class Any(Runtime):
        def library(self, content_hash: str) -> None:
            return None

    with pytest.raises(ArtifactCorruptError, match=r"'more.so'.*remove"):
        load("inductor", copy, model.manifest.graphs[digest], {}, {}, Any())  # type: ignore[arg-type]


def test_decision_13_and_14_the_package_is_unpacked_and_says_what_it_needs(traced):
    model, workdir = traced
    (graph,) = (model.artifact.path / "graphs").iterdir()
    names = sorted(path.relative_to(graph).as_posix() for path in graph.rglob("*") if path.is_file())
    code = "inductor/data/aotinductor/model/model.wrapper"
    assert names == ["graph.json", f"{code}.json", f"{code}.so", f"{code}_metadata.json", "ir.json", "program.json"]
    target = model.manifest.target
    assert target["march"].startswith(("x86-64", "native")) and target["arch"] == os.uname().machine
    assert set(target["cpu_features"]) <= cpu_features()
    metadata = json.loads((graph / f"{code}_metadata.json").read_text())
    assert "AMX" not in metadata.get("AOTI_CPU_ISA", "") or target["march"] == "native"
    assert list(workdir.glob("nxd-compile-*/inductor/*"))  # what the compiler wrote stays where it was asked to
    assert not list((workdir / "inductor").iterdir())
    versions = dict(model.manifest.versions)
    with pytest.raises(ArtifactVersionError, match="for a CPU with made_up, which this one lacks"):
        inductor.check_target({**target, "cpu_features": ["made_up"]}, versions)
    inductor.check_target(target, versions)


class Values(nn.Module):
    """Everything a compiler likes to bake in: uniform weights, small constants, scalars; and a state of each kind.

    In the same graph, as compiling takes its time, rows that are summed over: one large enough for two threads, and one
    that is not.
    """

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.register_buffer("offset", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2, 5, 6))
        self.table = torch.ones(6)

    def forward(self, x: Tensor, at: Tensor, large: Tensor, small: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(x) * torch.tensor([1.0, 1.0]).sum() + self.offset + self.table
        cache = torch.scatter(self.cache, 1, at[:, None, None].expand(2, 1, 6), hidden[:, None])
        return cache.sum(1) + self.cache[:, 0], cache, norm(large), norm(small)


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def values() -> tuple[nn.Module, dict]:
    module = Values()
    return module, {module.cache: 1}


def dict_of_norm() -> dict[str, Tensor]:
    return {"norm.weight": torch.ones(6), "norm.bias": torch.zeros(6)}


@pytest.fixture(scope="module")
def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(1, 1 << 18, generator=generator), torch.randn(4, 1024, generator=generator)


@pytest.fixture(scope="module")
def traced_values(rows, tmp_path_factory):
    """And the folder that the compiler wrote to."""
    workdir = tmp_path_factory.mktemp("values")
    example = torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64), *rows
    with trace(values, example, dict_of_norm, tp_degree=1, compiler_workdir=workdir) as model:
        yield model, example, workdir


def test_numbers_do_not_depend_on_the_number_of_threads(traced_values, rows):
    model, example, workdir = traced_values
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            model.reset_states()
            found.append(model(*example))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    torch.testing.assert_close(found[0][1], norm(rows[0]), rtol=1e-5, atol=1e-5)
    written = [file.read_text() for file in workdir.rglob("*.cpp")]
    assert any("#pragma omp parallel" in code for code in written), "what is large and sums nothing is shared"


class Runtime:
    context = None
    threads = 1

    def library(self, content_hash: str) -> None:
        raise AssertionError


def test_decisions_5_7_and_19_values_come_from_the_tensors_given_at_load(traced_values, rows):
    """Compiled on ones and zeros, run on others: uniform weights are not folded, small constants are not baked in."""
    model, _, _ = traced_values
    path = model.artifact.graph_dir(model.buckets[0].graphs[0])
    spec = model.manifest.graphs[model.buckets[0].graphs[0]]
    generator = torch.Generator().manual_seed(1)
    weights = {w.name: torch.randn(w.shape, generator=generator) for w in model.manifest.weights}
    assert {w.kind for w in model.manifest.weights} == {"parameter", "buffer", "constant"}
    states = {"cache": torch.zeros(2, 5, 6)}
    run = load("inductor", path, spec, states, weights, Runtime())  # type: ignore[arg-type]
    reference = load("eager", path, spec, {"cache": torch.zeros(2, 5, 6)}, weights, Runtime())  # type: ignore[arg-type]

    def equal(x: Tensor, at: Tensor) -> bool:
        found, wanted = run([x, at, *rows]), reference([x, at, *rows])
        return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, wanted, strict=True))

    for step in range(3):
        x, at = torch.randn(2, 6, generator=generator), torch.tensor([step, 4 - step])
        assert equal(x, at)
    assert states["cache"].abs().sum() > 0
    weights["offset"].add_(5)  # a change inside a tensor is seen at once
    assert equal(x, at)
    run.update_weights({"norm.weight": torch.zeros(6)})
    reference.update_weights({"norm.weight": torch.zeros(6)})
    assert equal(x, at)
    with pytest.raises(InputMismatchError, match=r"'x' has shape \[1, 6\]"):
        run([x[:1], at, *rows])
    with pytest.raises(WeightSchemaError, match="has shape"):
        load("inductor", path, spec, states, {**weights, "norm.bias": torch.zeros(5)}, Runtime())  # type: ignore[arg-type]


def test_a_graph_without_its_code_is_refused(traced, tmp_path):
    model, _ = traced
    digest = model.buckets[0].graphs[0]
    broken = tmp_path / digest
    shutil.copytree(model.artifact.graph_dir(digest), broken)
    shutil.rmtree(broken / "inductor")

    class Any(Runtime):
        def library(self, content_hash: str) -> None:
            return None

    with pytest.raises(ArtifactCorruptError, match="holds no compiled graph"):
        load("inductor", broken, model.manifest.graphs[digest], {}, {}, Any())  # type: ignore[arg-type]


def test_a_compiler_that_fails_says_why_and_leaves_nothing(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exec g++ --version;; esac\n'
        "echo 'broken-compiler: no space for jokes' >&2; exit 7\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    own = tmp_path / "temporary"  # other processes compile in the common one
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    config = BucketModelConfig()
    with pytest.raises(TraceError, match=r"compiling graph .* failed") as caught:
        trace(models.plus, [torch.zeros(7, 4)], lambda: {"weight": torch.ones(4)}, bucket_config=config, tp_degree=1)
    assert "jokes" in str(caught.value) or "jokes" in caught.value.remote_traceback
    assert not list(own.glob("nxd-compile-*"))


# --- options, targets, cache (nothing is compiled) ----------------------------------------------------


def test_options_are_checked_and_completed():
    base = inductor.options({})
    assert base["cpp.dynamic_threads"] is True and base["cpp.march"]
    assert "threads" not in inductor.target(base)
    fixed = inductor.options({"cpp.threads": 2, "max_autotune": True})
    assert (fixed["cpp.threads"], fixed["cpp.dynamic_threads"], fixed["max_autotune"]) == (2, False, True)
    assert inductor.target(fixed)["threads"] == 2
    native = inductor.options({"cpu_target": "native"})
    assert native["cpp.march"] == "native" and set(inductor.target(native)["cpu_features"])


def test_cpu_targets_are_levels_and_refused_where_the_machine_is_lower():
    from nxd_infer.backends.cpu.target import cpu_target

    if "avx2" in cpu_features():
        v3 = cpu_target("x86-64-v3", cpu_features(), "x86_64")
        assert (v3.march, v3.simdlen) == ("x86-64-v3", 256) and "avx512f" not in v3.features
    assert cpu_target(None, frozenset(), "x86_64").features == ()
    assert cpu_target(None, frozenset({"asimd"}), "aarch64").features == ("asimd",)
    with pytest.raises(TraceConfigError, match=r"needs .*avx2.* which this machine lacks"):
        cpu_target("x86-64-v3", frozenset(), "x86_64")
    with pytest.raises(TraceConfigError, match="this machine is aarch64"):
        cpu_target("x86-64-v3", frozenset(), "aarch64")


def test_decision_16_the_cache_is_bounded_and_forgets_the_least_recently_used(tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "cache"))
    for number in range(3):
        graph = tmp_path / f"graph{number}"
        graph.mkdir()
        (graph / "code").write_bytes(bytes(1000))
        compile_cache.store(f"digest{number}", graph)
        os.utime(
            next((tmp_path / "cache" / "graphs").glob(f"digest{number}-*")) / compile_cache.ENTRY, (number, number)
        )
    assert compile_cache.fetch("digest0", tmp_path / "out")  # used now: the newest
    compile_cache.prune(2500)
    left = {path.name.split("-")[0] for path in (tmp_path / "cache" / "graphs").glob("digest*")}
    assert left == {"digest0", "digest2"}
    assert (tmp_path / "out" / "code").stat().st_size == 1000
    assert not compile_cache.fetch("digest1", tmp_path / "none")
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")
    assert not compile_cache.fetch("digest0", tmp_path / "none")


def test_the_limit_of_the_cache_is_a_size(monkeypatch):
    sizes = {"": 4 << 30, "1000": 1000, "4G": 4 << 30, " 500m ": 500 << 20, "2KiB": 2048, "1TB": 1 << 40, "0": 0}
    for text, size in sizes.items():
        monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", text)
        assert compile_cache.cache_limit() == size, text
    for text in ("4 gigabytes", "-1", "1.5G", "G"):
        monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", text)
        with pytest.raises(TraceConfigError, match=rf"NXD_INFER_CACHE_LIMIT='{text}' is not a size"):
            compile_cache.cache_limit()
