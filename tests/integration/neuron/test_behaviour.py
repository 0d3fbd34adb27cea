"""torch_neuronx, the real one or the stand-in, keeps what is relied on."""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nxd_infer.backends.neuron import cores, runtime
from tests.integration.neuron.behaviour import CHECKS, Tools
from tests.support.neuron.machines import HAS_XLA, NEEDS_XLA, REAL, neuron_machine

pytestmark = pytest.mark.skipif(not HAS_XLA, reason=NEEDS_XLA)
OF_A_MACHINE = [name for name in CHECKS if "core" in name or "platform" in name or "group" in name]
"""Those that need one that can be described as one likes, or look inside the stand-in."""


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tools]:
    """On a machine of which this process has taken no core yet."""
    with neuron_machine(tmp_path / "machine", "inf2.24xlarge", 6):
        runtime.load()
        if REAL:
            cores.claim(2)
        else:
            os.environ[cores.VISIBLE] = "0-1"
            give_back()
        yield Tools(tmp_path, tmp_path / "machine")
        if not REAL:
            give_back()


def stand_in(module: str) -> types.ModuleType:
    return importlib.import_module(f"torch_neuronx.{module}")


def give_back() -> None:
    taken: Any = stand_in("_cores")
    for file in taken._files:
        os.close(file)
    taken._files.clear()
    taken._taken.clear()


@pytest.mark.parametrize("name", CHECKS)
def test_it_is_kept(name: str, tools: Tools) -> None:
    if REAL and name in OF_A_MACHINE:
        pytest.skip("it needs a machine that can be described as one likes")
    CHECKS[name](tools)
