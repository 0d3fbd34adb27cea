"""``python -m nxd_infer.compat``: a script written for neuronx_distributed runs unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys
import torch
import neuronx_distributed as nxd
import neuronx_distributed.parallel_layers.layers as layers_module
import sibling  # which lies beside the script, and that is not where it is started
from neuronx_distributed.parallel_layers import layers, parallel_state
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.pad import pad_model

class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nxd.parallel_layers.ParallelEmbedding(16, 8)
        self.up = ColumnParallelLinear(8, 12, gather_output=False)
        self.down = RowParallelLinear(12, 8, input_is_parallel=True)

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.embed(ids))))

model = pad_model(MLP(), tp_degree=parallel_state.get_tensor_model_parallel_size(), n_heads=4)
before = model(torch.tensor([1, 2, 3]))
nxd.parallel_layers.save({"model": model.state_dict()}, sys.argv[1])
torch.nn.init.zeros_(model.down.weight)
nxd.parallel_layers.load(sys.argv[1], model)
assert torch.equal(model(torch.tensor([1, 2, 3])), before)
assert layers is layers_module and layers.ColumnParallelLinear is ColumnParallelLinear
import nxd_infer.parallel_layers.layers
assert layers is nxd_infer.parallel_layers.layers and nxd is nxd_infer and nxd_infer.__spec__.name == "nxd_infer"
print("ran", __name__, len(sys.argv))
"""


def test_an_unchanged_script_runs(tmp_path: Path):
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "sibling.py").touch()
    done = subprocess.run(
        [sys.executable, "-m", "nxd_infer.compat", str(script), str(tmp_path / "out")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran __main__ 2"
    assert (tmp_path / "out" / "tp_rank_00_pp_rank_00").is_dir()
