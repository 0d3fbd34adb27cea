"""docs/migration.md says what tests show: each row of its table, and each point below it, has its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/migration.md").read_text()

SCRIPT = """
import torch
from neuronx_distributed.parallel_layers import ColumnParallelLinear
from neuronx_distributed.trace import parallel_model_trace
from torch_neuronx import BucketModelConfig
from beside import SIZE

def build():
    return ColumnParallelLinear(SIZE, SIZE), {}

if __name__ == "__main__":
    model = parallel_model_trace(build, torch.ones(1, SIZE), tp_degree=2, backend="eager")
    print("traced", tuple(model(torch.ones(1, SIZE)).shape))
    model.close()
"""


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_the_commands_of_the_page_start_a_script_as_it_is(launcher: str, tmp_path: Path):
    """One that traces, which imports it again in every rank, with a module of its own beside it."""
    (command,) = re.findall(rf"`({launcher} -m nxd_infer\.compat script\.py)`", TEXT)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    program, *arguments = command.split()
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "traced (1, 4)\n", done.stderr
