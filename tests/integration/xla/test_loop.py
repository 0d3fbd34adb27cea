"""A loop in neuronx_distributed's dialect with the real torch_xla: on its device, and beside it under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.xla.rig import SECONDS, require

require()

SCRIPT = str(Path(__file__).with_name("run_loop.py"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(device: str, launcher: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PJRT_DEVICE": device, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "-m", "nxd_infer.compat", SCRIPT, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("losses ")]
    return json.loads(line.removeprefix("losses "))


@pytest.fixture(scope="module")
def plain() -> list[float]:
    found = losses(run("CPU", [], "plain"))
    assert len(found) == 4 and found[-1] < found[0]
    return found


def test_on_the_device_of_torch_xla(plain: list[float]):
    assert losses(run("CPU", [], "xla", "xla", "xla://")) == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("device", ["CPU", "NEURON"])
def test_ranks_of_torchrun_train_over_gloo(device: str, plain: list[float]):
    """Whatever torch_xla is set to: its replacement of ``dist.new_group`` was in the way."""
    assert losses(run(device, TORCHRUN, "cpu", "gloo", "env://")) == pytest.approx(plain, abs=1e-5)


@pytest.mark.parametrize("method", ["xla://", "env://"])
def test_ranks_that_torch_xla_leaves_alone_are_refused(method: str):
    done = run("CPU", TORCHRUN, "xla", "xla", method)
    assert done.returncode != 0 and "among 1 of the 2 ranks" in done.stderr
