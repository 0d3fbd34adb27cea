"""A stage that raises, dies or stops ends the others within a bounded time, and they say why."""

from __future__ import annotations

import datetime
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError
from tests.support.ranks import run_ranks

LIMIT = 300.0
"""Seconds that a collective may wait here; a stage that was not told of a failure would end with this as its reason."""


class Layer(nn.Linear):
    fault = ""

    def forward(self, input: Tensor) -> Tensor:
        if self.fault == "raise":
            raise ZeroDivisionError("a layer divides by zero")
        if self.fault == "die":
            os._exit(3)
        return super().forward(input)


class Chain(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def pipelined(stages: int, shared: bool = True) -> Any:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, stages, timeout=LIMIT, shared_memory=shared)
    return nxd.pipeline.NxDPPModel(Chain(), auto_partition=True, num_microbatches=4)


def faulty(fault: str, stages: int, step: str = "run_train", shared: bool = True, at: int = -2) -> str:
    """With what error the step ends on this rank. ``at``: the stage at fault, the last one being -1."""
    model = pipelined(stages, shared)
    batch, run = torch.ones(8, 4), getattr(model, step)
    run(x=batch)
    if current_context().pp.rank == stages + at:
        for module in model.local_modules():
            if isinstance(module, Layer):
                module.fault = fault
    text = "no error"
    try:
        run(x=batch)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"ended {current_context().pp.rank}", "")
    if text.startswith("ZeroDivisionError"):  # a rank that raised may live on, and nothing collects what its step held
        store.wait([f"ended {rank}" for rank in range(stages)], datetime.timedelta(seconds=LIMIT))
    return text


@pytest.mark.parametrize(("step", "shared"), [("run_train", True), ("run_eval", False)])
def test_a_stage_that_raises_tells_the_others_its_traceback(step: str, shared: bool):
    found = run_ranks(faulty, 4, "raise", 4, step, shared)
    assert found[2] == "ZeroDivisionError: a layer divides by zero"
    for rank in (0, 1, 3):
        assert found[rank].startswith("CollectiveError: pipeline stage 2 (rank 2) failed:\nTraceback"), found[rank]
        assert "in forward" in found[rank] and "ZeroDivisionError: a layer divides by zero" in found[rank]


def test_the_last_stage_raises_while_the_first_has_nothing_left_to_do():
    found = run_ranks(faulty, 2, "raise", 2, "run_eval", True, -1)
    assert found[1] == "ZeroDivisionError: a layer divides by zero"
    assert found[0].startswith("CollectiveError: pipeline stage 1 (rank 1) failed:\nTraceback"), found[0]


def test_a_stage_that_is_lost():
    found = run_ranks(faulty, 2, "die", 2, lost=(0,))
    assert found[1].startswith("CollectiveTimeoutError: nxd: rank(s) [0] (pid "), found[1]
    assert "timed out" not in found[1].lower(), found[1]


def nonfinite() -> list[str]:
    model = pipelined(2)
    config = nxd.neuronx_distributed_config(pipeline_parallel_size=2)
    optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model.run_train(x=torch.ones(8, 4))
    if current_context().pp.rank == 1:
        next(model.parameters()).grad.fill_(float("nan"))
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    return list(caught.value.names)


def test_all_stages_refuse_gradients_that_are_not_finite_on_one():
    assert run_ranks(nonfinite, 2) == [["layers.2.weight"]] * 2
