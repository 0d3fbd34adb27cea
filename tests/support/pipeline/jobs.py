"""A model and an optimizer at any degrees, in a job that may have had others before; and the same in one process."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch

import nxd_infer as nxd
from nxd_infer import parallel_state
from tests.support.pipeline.models import decoder, tokens

F64 = torch.float64


def _groups(model: Any) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def job(
    pp: int, tp: int = 1, zero1: bool = False, make: Any = "tied", chunks: int = 1, **options: Any
) -> tuple[Any, Any]:
    """``make``: what builds the model, or the family of a decoder."""
    parallel_state.destroy_model_parallel()
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_config={"auto_partition": True, "num_microbatches": 4, "virtual_pipeline_size": chunks},
        optimizer_config={"zero_one_enabled": zero1},
        **options,
    )
    torch.manual_seed(3)
    model = nxd.initialize_parallel_model(config, partial(decoder, make, F64) if isinstance(make, str) else make)
    return model, nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, _groups(model), lr=1e-2)


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """The same batch on every data-parallel rank."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(model.run_train(**tokens(seed=step))))
        optimizer.step()
    return losses


def train_alone(make: Any, steps: int) -> tuple[Any, torch.optim.AdamW, list[float]]:
    """Trained here, in one process without groups."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**tokens(seed=step))[0]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, optimizer, losses


@functools.cache
def alone(family: str, steps: int) -> list[float]:
    return train_alone(partial(decoder, family, F64), steps)[2]
