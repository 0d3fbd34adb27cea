"""The chapter "Neuron PyTorch-Lightning" of both documents: every printed signature, called as printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nxd_infer import compat

compat.install()

pytest.importorskip("lightning")

import neuronx_distributed as nxd
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from neuronx_distributed.lightning import (
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
    NeuronXLAPrecisionPlugin,
    NeuronXLAStrategy,
)
from torch.utils.data import DataLoader

import nxd_infer.lightning
from nxd_infer import parallel_state
from tests.support.ranks import run_ranks
from tests.support.seeds.degrees import alone
from tests.support.seeds.model import Config, get_model, tokens
from tests.support.seeds.signatures import by_place, documented

DOCUMENTED = documented("""
NeuronLTModule(model_fn, nxd_config, opt_cls, scheduler_cls, model_args=(), model_kwargs={}, opt_args=(),
    opt_kwargs={}, scheduler_args=(), scheduler_kwargs={}, grad_accum_steps=1, log_rank0=False, manual_opt=True)
NeuronXLAStrategy(nxd_config=None, tensor_parallel_size=1, pipeline_parallel_size=1, save_load_xser=True)
NeuronTensorBoardLogger(save_dir)
""")


def test_signatures():
    for name, parameters in DOCUMENTED.items():
        assert by_place(getattr(nxd_infer.lightning, name)) == parameters


def test_names_and_base_classes():
    assert nxd.lightning is nxd_infer.lightning
    assert issubclass(NeuronLTModule, LightningModule) and issubclass(NeuronTQDMProgressBar, TQDMProgressBar)
    assert issubclass(NeuronTensorBoardLogger, TensorBoardLogger)


def documented_job(folder: str, tp: int, by_degree: bool = False) -> list[float]:
    """Positional, in the documents' order; the losses of two epochs."""
    parallel_state.destroy_model_parallel()
    nxd_config = nxd.neuronx_distributed_config(tensor_parallel_size=tp)
    losses: list[float] = []

    class Module(NeuronLTModule):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            losses.append(float(self.loss))

    torch.manual_seed(0)
    of_model, of_optimizer = ((), {"config": Config()}), ((1e-2,), {"weight_decay": 0.1})
    of_scheduler, others = ((1,), {"gamma": 0.5}), (1, False, True)
    classes = (torch.optim.AdamW, torch.optim.lr_scheduler.StepLR)
    model = Module(get_model, nxd_config, *classes, *of_model, *of_optimizer, *of_scheduler, *others)
    strategy = NeuronXLAStrategy(None, tp, 1, True) if by_degree else NeuronXLAStrategy(nxd_config=nxd_config)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=2,
        plugins=[NeuronXLAPrecisionPlugin()],
        logger=NeuronTensorBoardLogger(save_dir=folder),
        log_every_n_steps=1,
        callbacks=[NeuronTQDMProgressBar()],
        default_root_dir=folder,
    )
    trainer.fit(model=model, train_dataloaders=DataLoader(tokens(), 2 // strategy.data_parallel_size))
    assert model.optimizers().param_groups[0]["weight_decay"] == 0.1  # pyright: ignore
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**2)
    return losses


def test_the_documented_calls(tmp_path: Path):
    expected = alone(documented_job, str(tmp_path / "one"), 1)
    assert expected[1] < expected[0]
    for tp, by_degree in ((2, True), (1, False)):
        for losses in run_ranks(documented_job, 2, str(tmp_path / f"{tp}"), tp, by_degree):
            assert losses == pytest.approx(expected, rel=1e-6)
