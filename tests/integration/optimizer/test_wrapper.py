"""An optimizer that calls its closure in the middle of a step, on one rank and two; what ZeRO-1 shares of its state."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.errors import NonFiniteGradientError
from nxd_infer.optimizer import NxDOptimizer
from tests.support.optimizer.momentum import momentum
from tests.support.ranks import run_ranks
from tests.support.trainer.jobs import ZERO1


class Uphill(torch.optim.SGD):
    """It steps by the gradients a little uphill, so it calls the closure in the middle; and it counts."""

    zeroed = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, *, closure: Any) -> Any:
        members = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in members]
        for param in members:
            param.add_(param.grad, alpha=0.5)
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        for param, value in zip(members, before, strict=True):
            param.copy_(value)
        super().step()
        return "uphill", float(loss)


def walked(make: Any, rows: torch.Tensor) -> tuple[torch.Tensor, list[Any], int]:
    """The weights after three steps over ``rows``, what the steps returned, and how often gradients were zeroed."""
    model = nn.Linear(rows.shape[1], 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    optimizer = make(list(model.parameters()))

    def closure() -> torch.Tensor:
        loss = model(rows).pow(2).mean()
        loss.backward()
        return loss

    returned = []
    for _ in range(3):
        if isinstance(optimizer, Uphill):
            closure()  # the wrapper does
        returned.append(optimizer.step(closure=closure))
        optimizer.zero_grad()
    return model.weight.detach(), returned, optimizer.zeroed


def uphill(params: Any, **options: Any) -> NxDOptimizer:
    return NxDOptimizer(params, Uphill, defaults={"lr": 0.1}, grad_clipping=False, **options)


ROWS = torch.arange(12, dtype=torch.float32).view(4, 3) / 10

PLAIN = partial(Uphill, lr=0.1)


@pytest.mark.parametrize("options", [{}, {"master_weights": torch.float64}, {"zero1": True}], ids=str)
def test_an_optimizer_that_calls_the_closure_itself(options: dict):
    wanted, told, zeroed = walked(PLAIN, ROWS)
    weight, returned, count = walked(partial(uphill, **options), ROWS)
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=0)
    for mine_, plain in zip(returned, told, strict=True):
        assert mine_ == (plain[0], pytest.approx(plain[1], rel=1e-6))
    assert count >= zeroed == 6


@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_gradients_that_are_not_finite_in_the_middle_of_a_step(on_nonfinite: str):
    """The step is underway: it cannot be skipped, and would be made by them."""
    weight = nn.Parameter(torch.full((2,), 0.5))
    optimizer = uphill([weight], on_nonfinite=on_nonfinite)

    def closure() -> torch.Tensor:
        loss = (weight * float("inf" if weight.max() > 0.6 else 1)).sum()
        loss.backward()
        return loss

    with pytest.raises(NonFiniteGradientError, match="in the middle of its step"):
        optimizer.step(closure=closure)
    assert optimizer.skipped_steps == 0


APART = [(False, 3), (True, 3), (True, 1)]


def walked_apart() -> list[torch.Tensor]:
    rows = ROWS[2 * current_context().dp.rank :][:2]
    return [walked(partial(uphill, zero1=zero1), rows[:, :width])[0] for zero1, width in APART]


def test_ranks_call_the_closure_together():
    """Also where one of them has no element to update."""
    wanted = [walked(PLAIN, ROWS[:, :width])[0] for _, width in APART]
    for weights in run_ranks(walked_apart, 2, tp=1):
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=0)


# --- state --------------------------------------------------------------------------------------------------


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
