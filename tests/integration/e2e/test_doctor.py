"""``nxd-infer doctor``: what works here and what to do about the rest, whatever is broken."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from nxd_infer import native
from nxd_infer.backends import registry
from nxd_infer.errors import BackendUnavailableError
from nxd_models import registry as models
from tests.support.backends.plugins import installed
from tests.support.e2e.command import ROOT, here
from tests.support.needs import HAS_NATIVE


def lines(out: str, start: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(start)]


def row(out: str, name: str) -> list[str]:
    """The cells of a row, by its first."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines()]
    (found,) = (cells for cells in rows if cells[0] == name and len(cells) == 5)
    return found


def test_every_backend_has_a_row_and_every_model_type_is_named():
    done = here("doctor")
    assert done.status == 0, done.out
    for word in ("C++ compiler", "memory", "native operators"):
        assert word in done.out
    for name in registry.names():
        probe = registry.get(name).probe()
        _, runs, _, packages, devices = row(done.out, name)
        assert runs == ("yes" if probe else "no") and f"torch {probe.versions['torch']}" in packages
        assert (" core" in devices) == bool(probe)
    assert lines(done.out, "models: ") == [f"models: {', '.join(models.model_types())}"]


def test_a_broken_backend_or_model_harms_no_other(monkeypatch):
    real, breaks = registry.get, Mock(**{"probe.side_effect": RuntimeError("its library is for another torch")})
    monkeypatch.setattr(registry, "get", lambda name: breaks if name == "lockstep" else real(name))
    monkeypatch.syspath_prepend(ROOT / "tests/support/models/foreign")
    with installed():
        done = here("doctor")
    assert done.status == 0, done.out
    assert row(done.out, "cpu")[1:3] == ["yes", "yes"] and row(done.out, "lockstep")[1:3] == ["no", "no"]
    assert lines(done.out, "lockstep: ") == [
        "lockstep: cannot run: its probe failed: RuntimeError: its library is for another torch"
    ]
    (broken,) = lines(done.out, "broken: ")
    assert "the backend 'broken' of broken-backend cannot be imported: ModuleNotFoundError" in broken
    assert lines(done.out, "models: ")[0].endswith(", gpt2")
    monkeypatch.setitem(sys.modules, "tiny_gpt2", None)  # a package of models whose import fails
    names, broken = lines(here("doctor").out, "models: ")
    assert names.endswith(", gpt2") and "tiny_gpt2" in broken


def test_what_torch_2_9_lacks_is_said_in_the_same_words_everywhere(monkeypatch):
    """Here by taking the features away; on torch 2.9 they are not there."""
    monkeypatch.setattr(native, "has_stable_abi", lambda: False)
    monkeypatch.setattr(native, "_loaded", {})
    done = here("doctor")
    plain = registry.get("cpu").probe()
    assert plain and "the native operators need torch 2.13 or newer, this is" in plain.limits
    assert lines(done.out, "cpu: ") == [f"cpu: {plain.limits}"]
    assert done.out.rstrip().splitlines()[-1].startswith("ready: ")
    with pytest.raises(BackendUnavailableError, match=r"native operators need torch 2\.13 or newer"):
        native.load()


def test_a_cache_that_cannot_be_made_is_a_row(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NXD_INFER_CACHE", str(tmp_path / "file" / "cache"))
    done = here("doctor")
    said = " ".join(done.out.replace("│", " ").split())
    assert "cache missing: " in said and "(Not a directory): set NXD_INFER_CACHE to a directory" in said
    assert "Backends" in done.out and "Optional packages" in done.out


def test_it_imports_no_compiler():
    """Inductor's and torch_xla's imports take seconds each. An unknown level of instructions is said, as a reason."""
    if HAS_NATIVE:
        native.load()
    code = (
        "import sys\nfrom nxd_infer.cli.doctor import run\nrun()\n"
        "assert not {'torch._inductor', 'torch_xla'} & set(sys.modules)\n"
    )
    wrong = {**os.environ, "NXD_INFER_CPU_LEVEL": "AVX2", "COLUMNS": "160"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=wrong)
    assert done.returncode == 0, done.stderr
    assert not HAS_NATIVE or "NXD_INFER_CPU_LEVEL='AVX2' is not one of portable, avx2" in done.stdout, done.stdout
