"""The chapter "Neuron PyTorch-Lightning" of both documents: every printed signature and name."""

from __future__ import annotations

import pytest

from nxd_infer import compat

compat.install()

pytest.importorskip("lightning")

import neuronx_distributed as nxd
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from neuronx_distributed.lightning import (
    NeuronLTModule,
    NeuronTensorBoardLogger,
    NeuronTQDMProgressBar,
)

import nxd_infer.lightning
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
