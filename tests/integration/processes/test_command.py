"""Processes that this package starts import nothing from the directory they are started in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nxd_infer as nxd
from nxd_infer.backends.compile.pool import compile_graphs
from nxd_infer.errors import TraceError
from nxd_infer.processes.command import child_environment, python_code
from tests.support.backends.plugins import installed


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Stands in a directory whose modules leave a file behind when they are imported; yields the file's path."""
    place, marker = tmp_path / "downloaded", tmp_path / "ran"
    place.mkdir()
    for name in ("torch", "json", "runpy", "site", "nxd_infer", "typing", "pydantic", "multiprocessing"):
        (place / f"{name}.py").write_text(f"open({str(marker)!r}, 'a').write({name!r})\n")
    monkeypatch.chdir(place)
    return marker


def double():
    return torch.nn.Linear(2, 2), {}


def test_a_compile_process_imports_nothing_from_here(planted, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    with installed(), pytest.raises(TraceError, match=r"No such file or directory: .*ir\.json"):
        compile_graphs("lockstep", [Path.cwd() / "graph"], {}, workdir=planted.parent / "work")
    assert not planted.exists(), planted.read_text()


def test_a_rank_that_runs_func_imports_nothing_from_here(planted):
    with nxd.trace.parallel_model_trace(double, torch.ones(1, 2), tp_degree=1, backend="eager") as model:
        assert model(torch.ones(1, 2)).shape == (1, 2)
    assert not planted.exists(), planted.read_text()


def test_a_child_of_an_interactive_session_imports_nothing_from_here(planted, monkeypatch):
    """The session looks into the directory that it stands in, which may be another one than when it began."""
    (Path.cwd() / "nxd_server").mkdir()
    (Path.cwd() / "nxd_server" / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "nxd_server", raising=False)
    for entry in ("", "."):
        monkeypatch.setattr(sys, "path", [entry, *sys.path])
        subprocess.run(python_code("import pydantic, nxd_server"), env=child_environment(), check=True, timeout=600)
    assert not planted.exists(), planted.read_text()
