"""What a module, a strategy and a Trainer refuse before they train."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

import nxd_infer as nxd
from nxd_infer.errors import CheckpointError, NotInitializedError, NxdError, ParallelConfigError
from nxd_infer.lightning import NeuronLTModule, NeuronXLAStrategy
from nxd_infer.lightning.launcher import RankLauncher
from tests.support.lightning.jobs import Rows, module_of, trainer_of
from tests.support.trainer.models import llama


def one(strategy: Any = None) -> Any:
    return trainer_of(strategy or NeuronXLAStrategy(nxd.neuronx_distributed_config()))


def small() -> NeuronLTModule:
    return module_of(nxd.neuronx_distributed_config())


def test_the_class_cannot_build_its_model_from_a_checkpoint():
    with pytest.raises(CheckpointError, match="build the module and pass ckpt_path="):
        NeuronLTModule.load_from_checkpoint("last.ckpt")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"manual_opt": False}, "manual_opt=False is not supported"),
        ({"grad_accum_steps": 0}, "grad_accum_steps must be a whole number of at least 1, got 0"),
        ({"grad_accum_steps": True}, "grad_accum_steps must be a whole number of at least 1, got True"),
        ({"opt_args": range(20)}, "opt_args has 20 values, but SGD takes"),
        ({"grad_accum_steps": 2, "pp": 2}, "grad_accum_steps=2 with a pipeline: pass batches 2 times as large"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], said: str):
    config = {"pipeline_parallel_size": options.pop("pp", 1)}
    with pytest.raises(ParallelConfigError, match=said):
        NeuronLTModule(llama, config, torch.optim.SGD, None, **options)._named_opt_args()


def test_strategies_that_are_refused(tmp_path: Path):
    with pytest.raises(ParallelConfigError, match="tensor_parallel_size=4, but nxd_config has 2: leave it out"):
        NeuronXLAStrategy({"tensor_parallel_size": 2}, tensor_parallel_size=4)
    assert NeuronXLAStrategy(None, 2, 1, False).nxd_config.tensor_parallel_size == 2
    rows = DataLoader(Rows(), 4)
    with pytest.raises(NxdError, match="tensor_parallel_size=2 needs 2 processes"):
        one(NeuronXLAStrategy({"tensor_parallel_size": 2})).fit(small(), rows)
    with pytest.raises(ParallelConfigError, match="NeuronLTModule cannot train with SingleDeviceStrategy"):
        trainer_of("auto").fit(small(), rows)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ParallelConfigError, match="AsyncCheckpointIO cannot save ranks that share a model"):
        one(NeuronXLAStrategy(checkpoint_io=AsyncCheckpointIO())).fit(small(), rows)
    with pytest.raises(CheckpointError, match="nowhere is not a checkpoint of a Trainer"):
        one().fit(small(), rows, ckpt_path=tmp_path / "nowhere")
    nxd.save_checkpoint(tmp_path, "plain", llama(), user_content={"step": 1})
    with pytest.raises(CheckpointError, match="plain was not saved by a Trainer: load it with"):
        one().validate(small(), rows, ckpt_path=tmp_path / "plain")


def test_xla_devices_are_refused(monkeypatch):
    """By what the Trainer was given, and by what torch_xla was told: a single rank would train on the CPU silently."""
    with pytest.raises(ParallelConfigError, match=r"does not train on xla:0 .*: leave accelerator out or pass"):
        one(NeuronXLAStrategy(parallel_devices=[torch.device("xla", 0)]))
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    with pytest.raises(NotInitializedError, match="PJRT_DEVICE=NEURON: training over XLA devices is not supported"):
        one().fit(small(), DataLoader(Rows(), 4))


def test_an_interactive_session_has_no_program_to_start(monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python"])
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    with pytest.raises(ParallelConfigError, match="devices=2 runs this program 2 times, but an interactive session"):
        RankLauncher(2, lambda number: {}).launch(print)
