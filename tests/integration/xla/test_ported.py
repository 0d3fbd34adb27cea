"""Programs of examples/ported with the real torch_xla, on its device: what plain PyTorch gives, on one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.xla.rig import SECONDS, require

require()

from tests.integration.ported.test_programs import EXAMPLES, TRAINING, numbers  # noqa: E402

PROGRAMS = {program: expected for program, expected, _ in TRAINING if program in ("tp_zero1_llama_hf_pretrain.py",)}


@pytest.mark.parametrize(("program", "expected"), PROGRAMS.items(), ids=PROGRAMS)
def test_losses_are_those_of_plain_pytorch(program: str, expected: Callable[[], list[float]], tmp_path: Path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    command = [sys.executable, *launcher, "-m", "nxd_infer.compat", str(EXAMPLES / program)]
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(done.stdout, "losses") == pytest.approx(expected(), rel=1e-4)
