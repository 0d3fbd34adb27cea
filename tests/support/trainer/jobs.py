"""A model and an optimizer at the degrees in force, and this rank's part of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.trainer import NxDModel
from tests.support.trainer.models import llama, mlp, tokens, vectors

AdamW = torch.optim.AdamW
ZERO1 = {"optimizer_config": {"zero_one_enabled": True, "bucket_cap_mb": 0.01}}


def wrapped(model_fn: Any = llama, *args: Any, **options: Any) -> NxDModel:
    """The model at the degrees in force."""
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=parallel_state.get_tensor_model_parallel_size(), **options
    )
    return nxd.initialize_parallel_model(config, model_fn, *args)


def training(model_fn: Any = llama, groups: Any = None, seed: int = 0, optimizer_class: Any = AdamW, **options: Any):
    """(model, optimizer) at the degrees in force."""
    degree = parallel_state.get_tensor_model_parallel_size()
    config = nxd.neuronx_distributed_config(tensor_parallel_size=degree, **options)
    torch.manual_seed(seed)
    model = nxd.initialize_parallel_model(config, model_fn)
    parameters = model.parameters() if groups is None else groups(model)
    return model, nxd.initialize_parallel_optimizer(config, optimizer_class, parameters, lr=1e-2)


def trained_mlp() -> tuple[Any, Any]:
    """A small model and its optimizer, which have made a step."""
    model, optimizer = training(mlp)
    train(model, optimizer, vectors())
    return model, optimizer


def train(model: Any, optimizer: Any, batch: dict[str, Tensor], count: int = 1) -> list[float]:
    """Make ``count`` steps; their losses."""
    losses = []
    for _ in range(count):
        losses.append(float(model.run_train(**batch)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_of(model: Any, optimizer: Any, count: int) -> list[float]:
    """Train ``count`` steps on this rank's tokens."""
    return train(model, optimizer, mine(tokens()), count)


def mine(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """This data-parallel rank's rows."""
    dp = current_context().dp
    return {name: value.chunk(dp.degree)[dp.rank] for name, value in batch.items()}
