"""examples/train_to_serve.py, unchanged, on devices and on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nxd_infer.backends import registry
from nxd_infer.errors import BackendUnavailableError
from tests.support import tiny_models
from tests.support.backends.plugins import NAMES, installed

SCRIPT = Path(__file__).parents[3] / "examples" / "train_to_serve.py"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write_tiny("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.mark.parametrize("backend", ["cpu", "xla", "neuron"])
def test_it_trains_traces_saves_loads_and_serves(backend: str, model_dir: Path, tmp_path: Path) -> None:
    """The same greedy tokens everywhere: what it was taught."""
    with installed():
        found = registry.get(backend)
        if backend not in NAMES:
            pytest.skip(found.probe_compiler().reason)
        try:
            found.prepare_trace(2, found.options({}))
        except BackendUnavailableError as error:
            pytest.skip(str(error))
        command = [sys.executable, str(SCRIPT), backend, str(model_dir), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "efghijkl"
