"""The loop of docs/training.md, as it stands there, under torchrun: it trains, and every process ends with status 0."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELUDE = """
import torch
torch.set_num_threads(1)
from tests.trainer.models import CONFIG as config, tokens
from nxd_models.llama import CausalLM as get_model

def batches(rank, of):
    for _ in range(5):
        yield {name: value.chunk(of)[rank] for name, value in tokens().items()}
"""


def test_the_documented_loop(tmp_path: Path):
    text = (ROOT / "docs/training.md").read_text()
    loop = re.findall(r"```python\n(# train\.py.*?)```", text, re.DOTALL)
    assert len(loop) == 1
    script = tmp_path / "train.py"
    # The names of the reference, for a script that is ported by its imports alone.
    script.write_text(
        "import nxd_infer.compat\nnxd_infer.compat.install()\n"
        + PRELUDE
        + loop[0]
        .replace("import nxd_infer as nxd", "import neuronx_distributed as nxd")
        .replace("from nxd_infer.trainer", "from neuronx_distributed.trainer")
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--redirects", "3", "--log-dir", str(tmp_path / "logs"), str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    logs = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")}
    errors = "\n".join(path.read_text()[-2000:] for path in (tmp_path / "logs").rglob("stderr.log"))
    assert done.returncode == 0, done.stderr + errors
    assert sorted(logs) == ["0", "1"]
    losses = [float(line.split()[0]) for line in logs["0"].splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert "tensor(" in logs["0"] and logs["0"] == logs["1"]  # one tensor-parallel group: one loss, one norm
