"""The wrapped optimizer through its wrapper on ranks: closures, state, methods, copies, and two optimizers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from nxd_infer.context import current_context
from tests.support.optimizer.hands import filled_through_data, linear, sgd
from tests.support.optimizer.loops import PLAIN, ROWS, copied, uphill, walked
from tests.support.optimizer.momentum import momentum
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1

APART = [(False, 3), (True, 3), (True, 1)]


def test_ranks_call_the_closure_together():
    """Also where one of them has no element to update."""
    wanted = [walked(PLAIN, ROWS[:, :width])[0] for _, width in APART]
    for weights in run_ranks(walked_apart, 2, tp=1):
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=0)


def walked_apart() -> list[torch.Tensor]:
    rows = ROWS[2 * current_context().dp.rank :][:2]
    return [walked(partial(uphill, zero1=zero1), rows[:, :width])[0] for zero1, width in APART]


def state_of_a_share() -> list[float]:
    """How much of each parameter this rank holds a state of; asking for the others' changes nothing."""
    model, optimizer = momentum(**ZERO1)
    found = []
    for param in model.parameters():
        state = optimizer.state[param]
        found.append(state["speed"].numel() / param.numel() if param in optimizer.state else float(len(state)))
        if param not in optimizer.state:
            with pytest.raises(KeyError, match="other ranks update this parameter"):
                state["speed"] = param
            with pytest.raises(KeyError, match="other ranks update this parameter"):
                state.setdefault("speed", param)
    before = model.state_dict()["lm_head.weight"].clone()
    assert len(optimizer.state_dict()["state"]) == len(optimizer.state)
    optimizer.stop(also_weights=True)  # what it does to its share reaches the parameters of all
    assert before.any() and not model.state_dict()["lm_head.weight"].any()
    return found


def test_state_with_zero1_is_this_ranks_share():
    first, second = run_ranks(state_of_a_share, 2, tp=1)
    assert [a + b for a, b in zip(first, second, strict=True)] == pytest.approx([1.0] * len(first))
    assert 0.0 in first and 0.0 in second


def copied_over_ranks() -> list[list[bool]]:
    sequence = {"sequence_parallel": True} if current_context().tp.degree > 1 else {}
    return [
        copied(torch.float32, {**ZERO1, **sequence}, "model first"),
        copied(torch.bfloat16, ZERO1, "optimizer first"),
    ]


@pytest.mark.parametrize("tp", [1, 2])
def test_copies_over_ranks_go_on_alike(tp: int):
    assert run_ranks(copied_over_ranks, 2, tp=tp) == [[[True] * 4] * 2] * 2


def one_reaches_less() -> tuple[Tensor, Tensor, list[float]]:
    """Two optimizers, one backward; the second rank's does not reach the second optimizer's weights."""
    first, second = linear(torch.float64), linear(torch.float32)
    optimizers = sgd(first.parameters()), sgd(second.parameters())
    for _ in range(2):
        hidden = first(torch.ones(1, 4, dtype=torch.float64)).float()
        (second(hidden) if current_context().dp.rank == 0 else hidden).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return first.weight.detach(), second.weight.detach(), filled_through_data(zero1=True)


def test_over_ranks():
    first, second = linear(torch.float64), linear(torch.float32)
    optimizers = sgd(first.parameters()), sgd(second.parameters())
    for _ in range(2):
        hidden = first(torch.ones(1, 4, dtype=torch.float64)).float()
        ((second(hidden).sum() + hidden.sum()) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for found in run_ranks(one_reaches_less, 2, tp=1):
        torch.testing.assert_close(found[:2], (first.weight.detach(), second.weight.detach()))
        assert found[2] == [0.5] * 8 + [0.25] * 8  # each rank's share of the filled weights
