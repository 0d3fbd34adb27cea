"""The sample usage, and the wrappers of model and optimizer, as the documents call them."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_infer import compat

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed import parallel_state
from neuronx_distributed.parallel_layers import mappings
from neuronx_distributed.trainer.model import NxDModel

from tests.support.ranks import run_ranks
from tests.support.seeds import model as model_of_seeds
from tests.support.seeds.degrees import alone, at_degree
from tests.support.seeds.model import (
    Config,
    CoreAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaRMSNorm,
    get_model,
    tokens,
)

SEEDS = Path(model_of_seeds.__file__).parent


# --- "Sample usage" -----------------------------------------------------------------------------------------


def figures(output: str) -> list[tuple[str, float, str]]:
    """What each process says: the content that it found, its loss, and its rate and degrees."""
    lines = re.findall(r"found (.*) loss (\S+) (.*)", output)
    return [(content, float(loss), rest) for content, loss, rest in lines]


@pytest.mark.smoke
def test_sample_usage(tmp_path: Path, capsys, monkeypatch):
    """One process, and two that torchrun starts, tensor parallel, then data parallel from the checkpoint of those: one
    model, one loss, one checkpoint."""
    folders = {name: tmp_path / name for name in ("one", "two")}
    for folder in folders.values():
        folder.mkdir()
        for file in ("sample_usage.py", "model.py"):
            shutil.copy(SEEDS / file, folder)
    monkeypatch.chdir(folders["one"])
    monkeypatch.syspath_prepend(str(folders["one"]))
    monkeypatch.setattr(sys, "argv", ["sample_usage.py", "1"])
    expected = []
    for content, rate in (("None", "0.00025"), ("{'total_steps': 2}", "6.25e-05")):
        alone(runpy.run_path, "sample_usage.py")
        ((found, loss, rest),) = figures(capsys.readouterr().out)
        assert (found, rest) == (content, f"lr {rate} dp 1 tp 1")
        expected.append((content, loss, rate))
    assert expected[1][1] < expected[0][1]

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nxd_infer.compat")
    for (content, loss, rate), tp in zip(expected, (2, 1), strict=True):
        done = subprocess.run(
            [sys.executable, *torchrun, "sample_usage.py", str(tp)],
            cwd=folders["two"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        both = figures(done.stdout)
        assert [(found, rest) for found, _, rest in both] == [(content, f"lr {rate} dp {2 // tp} tp {tp}")] * 2
        assert sum(one for _, one, _ in both) / 2 == pytest.approx(loss, rel=1e-4)  # of its own rows, or of all
    for name, size in (("one", 1), ("two", 2)):
        (manifest,) = (folders[name] / "ckpts").rglob("manifest.json")  # the second save replaced the first
        assert json.loads(manifest.read_text())["world_size"] == size


# --- the guide of the wrappers ------------------------------------------------------------------------------


def guide_config(tp: int, zero1: bool, selective: bool, pp: int = 1) -> dict[str, Any]:
    return nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config={
            "transformer_layer_cls": LlamaDecoderLayer,
            "num_microbatches": 1,
            "output_loss_value_spec": (True, False),
            "input_names": ["input_ids", "attention_mask", "labels"],
            "pipeline_cuts": ["layers.0"] if pp == 2 else [],
            "trace_file_path": None,
            "param_init_fn": None,
            "leaf_module_cls": [LlamaRMSNorm.__name__],
            "autowrap_modules": [mappings],
            "use_zero1_optimizer": zero1,
            "use_optimizer_wrapper": True,
        },
        optimizer_config={"zero_one_enabled": zero1, "grad_clipping": True, "max_grad_norm": 1.0},
        activation_checkpoint_config=CoreAttention if selective else "full",
    )


def wrapper_guide(tp: int, selective: bool, zero1: bool) -> list[float]:
    nxd_config = guide_config(tp, zero1, selective)
    config, inputs = Config(), (tokens(), torch.ones(2, 8), tokens())
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd_config, get_model, config)
    loss = model.run_train(*inputs)
    losses = [float(loss)]
    model.zero_grad()
    loss = model(*inputs)
    loss[0].backward()
    losses.append(loss[0].item())
    assert isinstance(model, NxDModel) and isinstance(model.local_module(), LlamaForCausalLM)
    assert (model.dtype, model.config, model.name_or_path) == (torch.float32, config, "tiny")
    inner = model.local_module()
    for name in ("parameters", "buffers", "modules", "children"):
        assert dict(getattr(model, f"named_{name}")()) == dict(getattr(inner, f"named_{name}")())
        assert [id(one) for one in getattr(model, name)()] == [id(one) for one in getattr(inner, name)()]

    param_groups = [{"params": list(model.parameters())}]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, param_groups, **settings)
    assert isinstance(optimizer, torch.optim.Optimizer) and optimizer.grad_norm is None
    optimizer.step()
    losses.append(float(optimizer.grad_norm))
    assert settings.items() <= optimizer.param_groups[0].items()
    nxd_config["optimizer_config"]["grad_clipping"] = False
    optimizer = nxd.initialize_parallel_optimizer(nxd_config, torch.optim.AdamW, model.parameters())
    optimizer.step()
    assert optimizer.grad_norm is None
    losses.append(float(model.run_train(*inputs)))
    return losses


def test_the_wrapper_guide():
    expected = alone(wrapper_guide, 1, False, False)
    assert expected[0] == expected[1] > expected[3] and expected[2] > 0
    assert alone(wrapper_guide, 1, True, True) == pytest.approx(expected, rel=1e-5)
    for losses in at_degree(2, wrapper_guide, 2, True, True):
        assert losses == pytest.approx(expected, rel=1e-4)


def guide_in_stages(pp: int) -> list[float]:
    """The guide where "pipeline parallel is enabled": ``run_train(*inputs)``; losses and norms."""
    parallel_state.destroy_model_parallel()  # ranks of the tests begin initialised
    nxd_config = guide_config(1, True, False, pp)
    inputs, found = (tokens(), torch.ones(2, 8), tokens()), []
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd_config, get_model, Config())
    assert (model.dtype, model.config, model.name_or_path) == (torch.float32, Config(), "tiny")
    param_groups = [{"params": list(model.parameters())}]
    optimizer = nxd.initialize_parallel_optimizer(
        nxd_config, torch.optim.AdamW, param_groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
    )
    for _ in range(3):
        loss = model.run_train(*inputs)
        optimizer.step()
        found += [0.0 if loss is None else float(loss), float(optimizer.grad_norm)]
        optimizer.zero_grad()
    return found


def test_the_wrapper_guide_in_pipeline_stages():
    """The last stage has the loss, unless ``broadcast_and_average_loss`` is asked for."""
    expected = alone(guide_in_stages, 1)
    first, last = run_ranks(guide_in_stages, 2, 2, pp=2)
    assert last == pytest.approx(expected, rel=1e-4) and first[1::2] == pytest.approx(expected[1::2], rel=1e-4)
