"""Configurations, the wrappers of model and optimizer, and ZeRO-1, as the documents call them."""

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
from torch import nn
from torch.optim import AdamW

from nxd_infer import compat

compat.install()

import neuronx_distributed as nxd
from neuronx_distributed.optimizer import NeuronZero1Optimizer
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.trainer.model import NxDModel

from tests.support.ranks import run_ranks
from tests.support.seeds import model as model_of_seeds
from tests.support.seeds.degrees import alone, at_degree
from tests.support.seeds.guide import guide_config
from tests.support.seeds.model import Config, CoreAttention, LlamaDecoderLayer, LlamaForCausalLM, get_model, tokens

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


# --- configurations -----------------------------------------------------------------------------------------


def init_weights(module: nn.Module) -> None:
    """A ``param_init_fn``: the parameters of this module only."""
    for param in module.parameters(recurse=False):
        nn.init.constant_(param, 0.1)


CONFIGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "as documented": {
        "pipeline_parallel_size": 1,
        "pipeline_config": None,
        "optimizer_config": {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0},
        "activation_checkpoint_config": None,
        "pad_model": False,
        "sequence_parallel": False,
        "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
        "lora_config": None,
    },
    "full": {
        "activation_checkpoint_config": "full",
        "pipeline_config": {"transformer_layer_cls": LlamaDecoderLayer},
        "pad_model": True,
    },
    "selective": {
        "activation_checkpoint_config": CoreAttention,
        "optimizer_config": {"zero_one_enabled": True},
        "model_init_config": {"sequential_move_factor": 1},
    },
    "meta": {"model_init_config": {"meta_device_init": True, "param_init_fn": init_weights}},
}


def losses_of_configurations(tp: int) -> dict[str, list[float]]:
    found = {}
    for name, options in CONFIGS.items():
        nxd_config = nxd.trainer.neuronx_distributed_config(tensor_parallel_size=tp, **options)
        torch.manual_seed(0)
        model = nxd.trainer.initialize_parallel_model(nxd_config, get_model)
        optimizer = nxd.trainer.initialize_parallel_optimizer(nxd_config, AdamW, model.parameters(), lr=1e-2)
        found[name] = []
        for _ in range(3):
            found[name].append(float(model.run_train(tokens())))
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_configurations():
    """What saves memory or time changes no loss, at no degree."""
    expected = alone(losses_of_configurations, 1)
    assert len({tuple(losses) for name, losses in expected.items() if name != "meta"}) == 1
    assert all(losses[2] < losses[0] for name, losses in expected.items() if name != "meta")
    for found in at_degree(2, losses_of_configurations, 2):
        for name, losses in found.items():
            steps = 1 if name == "meta" else 3  # equal weights everywhere: rounding alone decides where they go
            assert losses[:steps] == pytest.approx(expected[name][:steps], rel=1e-4), name


# --- the guide of the wrappers ------------------------------------------------------------------------------


def wrapper_guide(tp: int, selective: bool, zero1: bool) -> list[float]:
    nxd_config = guide_config(tp, 1, [], 1, zero1, selective)
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


# --- ZeRO-1 -------------------------------------------------------------------------------------------------


def zero_sample(folder: str, tp: int) -> list[float]:
    no_decay = ["norm"]
    torch.manual_seed(0)
    model = nxd.initialize_parallel_model(nxd.neuronx_distributed_config(tp), get_model)
    param_optimizer = list(model.named_parameters())
    optimizer_grouped_parameters = [
        {"params": [p for n, p in param_optimizer if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in param_optimizer if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = NeuronZero1Optimizer(
        optimizer_grouped_parameters,
        AdamW,
        lr=1e-2,
        pin_layout=False,
        sharding_groups=parallel_state.get_data_parallel_group(as_list=True),
        grad_norm_groups=parallel_state.get_tensor_model_parallel_group(as_list=True),
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    losses = []
    for step in range(3):
        losses.append(float(model.run_train(tokens())))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            optimizer.save_sharded_state_dict(folder, save_serially=True)
            optimizer.save_sharded_state_dict(folder, False)
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.load_sharded_state_dict(folder)
            optimizer.load_sharded_state_dict(folder, num_workers_per_step=8)
            assert optimizer.param_groups[0]["lr"] == 1e-2
    losses.append(float(model.run_train(tokens())))
    return losses


def test_the_zero1_sample(tmp_path: Path):
    expected = alone(zero_sample, str(tmp_path / "one"), 1)
    assert expected == sorted(expected, reverse=True)
    for losses in run_ranks(zero_sample, 2, str(tmp_path / "two"), 1, tp=1):  # all ranks have the same rows
        assert losses == pytest.approx(expected, rel=1e-4)
