"""A process that a launcher started trains as one of several, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import nxd_infer as nxd
from nxd_infer.distributed import ParallelizersManager
from nxd_infer.errors import NotInitializedError, NxdError
from nxd_infer.modules.lora import LoraConfig, LoRAModel
from nxd_infer.optimizer import NxDOptimizer
from nxd_infer.pipeline import NxDPPModel


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "the environment has no RANK, MASTER_ADDR, MASTER_PORT: start"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number of at least 1, got 'two'"),
        (
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "PJRT_DEVICE": "NEURON"},
            "PJRT_DEVICE=NEURON: training over XLA devices is not supported yet",
        ),
        (
            {"WORLD_SIZE": "2", "RANK": "first", "MASTER_ADDR": "::1", "MASTER_PORT": "1"},
            "RANK must be a whole number of at least 0, got 'first'",
        ),
        (  # alone on a machine that says it has GPUs, which it would not train on
            {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", "LOCAL_RANK": "0"},
            r"LOCAL_RANK=0, but this machine has 0 GPU\(s\)",
        ),
    ],
)
def test_a_launched_process_never_goes_on_alone(environment: dict[str, str], said: str, monkeypatch, tmp_path: Path):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT", "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    config = nxd.neuronx_distributed_config()
    adapted = LoRAModel(nn.Sequential(nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "LOCAL_RANK" in environment)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    param = nn.Parameter(torch.ones(2))
    for action in (
        nxd.neuronx_distributed_config,
        nxd.parallel_state.initialize_model_parallel,
        lambda: nxd.initialize_parallel_model(config, nn.Linear, 2, 2),
    ):
        with pytest.raises(NxdError, match=said):
            action()
    if environment["WORLD_SIZE"] == "2":
        for what, action in (
            ("NxDOptimizer", lambda: NxDOptimizer([param], torch.optim.SGD)),
            ("NxDPPModel", lambda: NxDPPModel(nn.Linear(2, 2))),
            ("parallelize", lambda: ParallelizersManager.parallelizer_for_model("llama").parallelize(nn.Linear(2, 2))),
            ("clip_grad_norm", lambda: nxd.parallel_layers.clip_grad_norm([param], 1.0)),
            ("save_checkpoint", lambda: nxd.save_checkpoint(tmp_path, "first", nn.Linear(2, 2))),
            ("save", lambda: nxd.parallel_layers.save({"step": 1}, tmp_path / "one")),
            ("save_adapter", lambda: adapted.save_adapter(tmp_path / "adapter")),
        ):
            with pytest.raises(NotInitializedError, match=f"{what}: this process is one of 2, but model parallelism"):
                action()
    assert not list(tmp_path.iterdir()) and not torch.distributed.is_initialized()
