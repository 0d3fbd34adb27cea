"""A stage that raises, dies or stops ends the others within a bounded time, and they say why."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import parallel_state
from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError
from tests.ranks import run_ranks

LIMIT = 8.0
"""Seconds that a collective may wait here; stages that are told end far earlier."""


class Layer(nn.Linear):
    fault = ""

    def forward(self, input: Tensor) -> Tensor:
        if self.fault == "raise":
            raise ZeroDivisionError("a layer divides by zero")
        if self.fault == "die":
            os._exit(3)
        if self.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().forward(input)


class Chain(nn.Module):
    def __init__(self, layers: int = 4):
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def pipelined(stages: int, **options: Any) -> Any:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, stages, timeout=LIMIT)
    return nxd.pipeline.NxDPPModel(Chain(), auto_partition=True, num_microbatches=4, **options)


def faulty(fault: str, stages: int) -> tuple[float, str]:
    """Seconds until run_train ends on this rank, and its error."""
    model = pipelined(stages)
    batch = torch.ones(8, 4)
    model.run_train(x=batch)
    if current_context().pp.rank == stages - 2:
        for module in model.local_modules():
            if isinstance(module, Layer):
                module.fault = fault
    start = time.monotonic()
    try:
        model.run_train(x=batch)
    except Exception as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return time.monotonic() - start, "no error"


def test_a_stage_that_raises_tells_the_others_its_traceback():
    found = run_ranks(faulty, 4, "raise", 4, timeout=60)
    assert found[2][1] == "ZeroDivisionError: a layer divides by zero"
    for rank in (0, 1, 3):
        seconds, text = found[rank]
        assert text.startswith("CollectiveError: pipeline stage 2 (rank 2) failed:\nTraceback"), text
        assert "in forward" in text and "ZeroDivisionError: a layer divides by zero" in text
        assert seconds < LIMIT


@pytest.mark.parametrize("fault", ["die", "stop"])
def test_a_stage_that_is_lost(fault: str):
    found = run_ranks(faulty, 2, fault, 2, lost=(0,), timeout=60)
    seconds, text = found[1]
    assert text.startswith("CollectiveTimeoutError: nxd: rank(s) [0] (pid "), text
    assert seconds < (LIMIT + 5 if fault == "stop" else LIMIT)


def nonfinite() -> list[str]:
    model = pipelined(2)
    optimizer = nxd.initialize_parallel_optimizer(
        nxd.neuronx_distributed_config(pipeline_parallel_size=2), torch.optim.SGD, model.parameters(), lr=0.1
    )
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
