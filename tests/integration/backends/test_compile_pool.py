"""The processes that compile graphs, and the cache of what they have compiled, with a backend of another package."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nxd_infer as nxd
from nxd_infer.backends import registry
from nxd_infer.backends.compile import cache as compile_cache
from nxd_infer.backends.compile import pool as compile_pool
from nxd_infer.backends.compile.pool import compile_graphs
from nxd_infer.errors import TraceError
from nxd_infer.runtime.load import load_artifact
from tests.support.backends import small_traces
from tests.support.backends.plugin.lockstep import BACKEND, CODE
from tests.support.backends.plugins import installed
from tests.support.processes import gone, wait_until

WORKER = """
import subprocess, sys
from nxd_infer.backends import registry
from nxd_infer.backends.compile.worker import main
class Backend:
    def compile(self, graph, options):
        compiler = subprocess.Popen(["sh", "-c", "sleep 600 & echo $! > pid.part; mv pid.part pid; wait"], cwd=graph)
        compiler.wait()
registry.get = lambda name: Backend()
main(sys.argv[1:])
"""
TRACE = f"""
import sys
from pathlib import Path
from nxd_infer.backends.compile import pool
from nxd_infer.processes.command import python_code
pool.python_module = lambda name, *arguments: python_code({WORKER!r}, *arguments)
pool.compile_graphs("eager", [Path(sys.argv[1])], {{}})
"""


def test_a_compiler_ends_with_the_trace_that_started_it(tmp_path: Path) -> None:
    """Also what the compiler has started: those of Neuron are programs that run several others, for many minutes."""
    trace = subprocess.Popen([sys.executable, "-c", TRACE, str(tmp_path)])
    try:
        wait_until(lambda: (tmp_path / "pid").exists() or trace.poll() is not None, 300)
        compiler = int((tmp_path / "pid").read_text())
    finally:
        trace.kill()
        trace.wait(60)
    assert gone(compiler, 60)


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    with installed():
        yield


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Path]:
    """A folder with an artifact and the ``cache`` that its trace has filled."""
    with small_traces.cache_at(tmp_path / "cache"):
        nxd.trace.parallel_model_recompile(small_traces.net(), tmp_path / "artifact", backend="lockstep")
        yield tmp_path


def graph_of(cached: Path) -> tuple[str, Path]:
    artifact = load_artifact(cached / "artifact")
    (digest,) = artifact.manifest.graphs
    return digest, artifact.graph_dir(digest)


def test_decision_16_a_cache_entry_that_is_damaged_or_anothers_is_not_used(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digest, graph), compiler, out = graph_of(cached), BACKEND.compiler(), tmp_path / "out"
    assert compiler and not compile_cache.fetch(digest, out, f"{compiler}.1")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # which costs no entry
        patch.setattr(shutil, "copyfile", full)
        assert not compile_cache.fetch(digest, out, compiler)
    (entry,) = (path for path in (cached / "cache" / "graphs").iterdir() if path.is_dir())
    (code,) = entry.rglob(CODE)
    data = bytearray(code.read_bytes())
    data[len(data) // 2] ^= 1
    code.write_bytes(data)
    assert not compile_cache.fetch(digest, out, compiler)
    assert not out.exists() and not entry.exists()
    compile_cache.store(digest, graph, compiler)
    assert compile_cache.fetch(digest, out, compiler) and next(out.rglob(CODE)).exists()


def test_a_cache_that_cannot_be_used_is_done_without(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (digest, graph), compiler = graph_of(cached), BACKEND.compiler()
    monkeypatch.setenv("NXD_INFER_CACHE", "/proc/no/such/place")
    assert not compile_cache.fetch(digest, tmp_path / "out", compiler)
    compile_cache.store(digest, graph, compiler)


def test_an_error_is_told_where_files_cannot_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workdir that takes nothing hides no error."""
    temporary, workdir = tmp_path / "tmp", tmp_path / "work"
    temporary.mkdir()
    workdir.touch()  # what is moved there fails, as on a full disk
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with pytest.raises(TraceError, match=r"compiling graph nothing failed: .*No such file"):
        compile_graphs("lockstep", [tmp_path / "nothing"], {}, workdir=workdir, timeout=600)
    said = "compiler_workdir: what the compiler wrote cannot be moved to"
    with pytest.raises(TraceError, match=said), compile_pool.workplace(workdir):
        pass
    assert not list(temporary.glob("nxd-compile-*"))


def test_a_compile_that_takes_too_long_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")  # else what was compiled before is taken
    net, out = small_traces.net(), tmp_path / "out"
    late = {"backend": "lockstep", "compile_timeout": 0.01}
    for made in (
        lambda: nxd.trace.parallel_model_recompile(net, out, **late),
        lambda: small_traces.trace_net(artifact_dir=out, **late),
    ):
        with pytest.raises(TraceError, match=r"longer than 0.01 s; raise compile_timeout"):
            made()
    assert registry.get("lockstep").compiles and not out.exists() and not list(own.glob("nxd-*compile-*"))
