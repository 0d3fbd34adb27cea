"""``nxd_infer.compat``: scripts written for neuronx_distributed run unchanged, and a real package is never hidden."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys
import torch
import neuronx_distributed as nxd
import neuronx_distributed.parallel_layers.layers as layers_module
import sibling  # which lies beside the script, and that is not where it is started
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import layers, mappings, parallel_state, utils as neuronx_dist_utils
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.pad import get_number_of_extra_heads, pad_model

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
assert layers is nxd_infer.parallel_layers.layers and nxd is nxd_infer
assert nxd_infer.__spec__.name == "nxd_infer" and isinstance(model.up, nxd_infer.parallel_layers.ColumnParallelLinear)
try:
    import neuronx_distributed.kernels
except ModuleNotFoundError as error:
    assert "nxd_infer.kernels" in str(error) and error.name == "neuronx_distributed.kernels"
else:
    raise SystemExit("an absent module was imported")
print("ran", __name__, len(sys.argv))
"""


def run(*command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_an_unchanged_script_runs(tmp_path: Path):
    script = tmp_path / "scripts" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "sibling.py").touch()
    done = run("-m", "nxd_infer.compat", str(script), str(tmp_path / "out"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ran __main__ 2"
    assert (tmp_path / "out" / "tp_rank_00_pp_rank_00").is_dir()
    without = run(str(script), str(tmp_path / "out"), folder=tmp_path)
    assert without.returncode != 0 and "No module named 'neuronx_distributed'" in without.stderr


REFUSAL = textwrap.dedent(
    """
    from nxd_infer import compat
    try:
        compat.install()
    except compat.AliasError as error:
        print("refused", "force=True" in str(error))
    import neuronx_distributed
    print(neuronx_distributed.REAL)
    compat.install(force=True)
    compat.install()
    import neuronx_distributed.parallel_layers
    print(neuronx_distributed.parallel_layers.__name__)
    compat.uninstall()
    import neuronx_distributed
    print(neuronx_distributed.REAL)
    """
)


HELPER = textwrap.dedent(
    """
    import importlib.util, sys
    from nxd_infer import compat
    from nxd_infer.trace import BucketModelConfig as ours
    assert importlib.util.find_spec("torch_neuronx") is None or "real" in sys.argv
    compat.install()
    import torch_neuronx
    from torch_neuronx import BucketModelConfig
    print(BucketModelConfig is ours, getattr(torch_neuronx, "REAL", "ours"))
    try:
        import torch_neuronx.xla_impl
    except ModuleNotFoundError as error:
        print(error.name)
    compat.uninstall()
    print("torch_neuronx" in sys.modules)
    """
)


def test_torch_neuronx_is_stood_in_for_where_it_is_absent_and_never_hidden(tmp_path: Path):
    done = run("-c", HELPER, folder=tmp_path)
    assert done.stdout.split("\n")[:3] == ["True ours", "torch_neuronx.xla_impl", "False"], done.stderr
    real = tmp_path / "torch_neuronx"
    real.mkdir()
    (real / "__init__.py").write_text("REAL = 'theirs'\nclass BucketModelConfig: pass\n")
    done = run("-c", HELPER, "real", folder=tmp_path)
    assert done.stdout.split("\n")[:3] == ["False theirs", "torch_neuronx.xla_impl", "True"], done.stderr


def test_a_real_package_is_not_hidden(tmp_path: Path):
    real = tmp_path / "neuronx_distributed"
    real.mkdir()
    (real / "__init__.py").write_text("REAL = 1\n")
    done = run("-c", REFUSAL, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:4] == ["refused True", "1", "nxd_infer.parallel_layers", "1"]


def test_usage(tmp_path: Path):
    for words in ([], ["--help"], ["nowhere.py"]):
        done = run("-m", "nxd_infer.compat", *words, folder=tmp_path)
        assert done.returncode != 0 and "usage: python -m nxd_infer.compat script.py" in done.stderr
        assert "Traceback" not in done.stderr
    assert "there is no 'nowhere.py'" in done.stderr


def test_what_is_not_here_says_what_does_its_work():
    with pytest.raises(ImportError, match="parallel_model_trace does its work"):
        from nxd_infer.trace import ModelBuilder  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]
