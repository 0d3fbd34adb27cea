"""docs/migration.md says what tests show: each row of its table, and each point below it, has its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TEXT = (Path(__file__).parents[3] / "docs/migration.md").read_text()

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


def test_the_command_of_the_page_starts_a_script_as_it_is(tmp_path: Path):
    """One that traces, which imports it again in every rank, with a module of its own beside it. The same under
    torchrun is :mod:`test_training`'s sample usage."""
    command = "python -m nxd_infer.compat script.py"
    assert f"`{command}`" in TEXT and f"`torchrun{command.removeprefix('python')}`" in TEXT
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("SIZE = 4\n")
    done = subprocess.run(
        [sys.executable, *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout == "traced (1, 4)\n", done.stderr
