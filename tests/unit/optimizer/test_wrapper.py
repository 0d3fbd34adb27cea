"""The wrapped optimizer through its wrapper: attributes, methods, state under the model's parameters, copies, hooks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from nxd_infer.errors import NonFiniteGradientError
from nxd_infer.optimizer import NxDOptimizer
from tests.support.optimizer.loops import PLAIN, ROWS, copied, goes_on, uphill, walked
from tests.support.optimizer.momentum import SETTINGS, Momentum, momentum
from tests.support.trainer.jobs import ZERO1, training
from tests.support.trainer.models import llama, tokens


@pytest.mark.parametrize("options", SETTINGS, ids=["plain", "masters", "zero1"])
def test_attributes_and_methods_are_the_wrapped_optimizers(options: dict):
    model, optimizer = momentum(torch.bfloat16, **options)
    assert optimizer.kind == "momentum" and optimizer.rate == 1e-2
    optimizer.scale = 0.5  # one that its step reads
    assert optimizer.optimizer.scale == 0.5 and optimizer.rate == 5e-3
    optimizer.param_groups[0]["lr"] = 1.0
    assert max(optimizer.speed_of(factor=2.0)) > 0
    assert optimizer.optimizer.param_groups[0]["lr"] == 1.0  # its methods see what a schedule has set
    assert optimizer.stop() == "stopped" and max(optimizer.speed_of(2.0)) == 0
    assert optimizer.param_groups[0]["lr"] == 0.25
    optimizer.mine = 3  # one that it does not have stays here
    assert not hasattr(optimizer.optimizer, "mine") and optimizer.mine == 3
    assert optimizer.stop(also_weights=True) == "stopped"
    assert not any(param.any() for param in model.parameters())
    with pytest.raises(AttributeError, match=r"neither .*Optimizer nor the Momentum in it has an attribute 'kinds'"):
        _ = optimizer.kinds
    assert not hasattr(optimizer, "_private")


def test_a_step_takes_what_the_wrapped_optimizers_does():
    once, twice = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizers = [
        NxDOptimizer([param], Momentum, defaults={"lr": 0.125}, grad_clipping=False) for param in (once, twice)
    ]
    (once.sum() + twice.sum()).backward()
    optimizers[0].step(times=1)
    optimizers[1].step(None, 2)
    assert torch.equal(1 - twice, 2 * (1 - once)) and once[0] == 0.875


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


def test_a_closure_is_called_once_for_an_optimizer_that_asks_first():
    model, calls = nn.Linear(3, 2), []
    optimizer = NxDOptimizer(model.parameters(), torch.optim.AdamW, defaults={"lr": 0.1})

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(ROWS).pow(2).mean()
        loss.backward()
        calls.append(loss)
        return loss

    for number in range(1, 4):
        assert optimizer.step(closure) is calls[-1] and len(calls) == number


@pytest.mark.parametrize("options", SETTINGS, ids=["plain", "masters", "zero1"])
def test_state_is_found_under_the_models_parameters(options: dict):
    model, optimizer = momentum(torch.bfloat16, **options)
    params = list(model.parameters())
    assert {id(param) for param in optimizer.state} == {id(param) for param in params}
    for param in params:
        assert list(optimizer.state[param]) == ["speed"] and param in optimizer.state
        assert optimizer.state[param]["speed"].numel() == param.numel()
    first = params[0]
    optimizer.state[first]["speed"].fill_(2.0)
    assert max(optimizer.speed_of(1.0)) == pytest.approx(2.0 * first.numel() ** 0.5, rel=1e-2)
    optimizer.state[first] = {"speed": torch.zeros_like(optimizer.state[first]["speed"])}
    assert min(optimizer.speed_of(1.0)) == 0
    del optimizer.state[first]
    assert first not in optimizer.state and optimizer.state.get(first) is None
    assert len(optimizer.state) == len(params) - 1 == len(optimizer.state_dict()["state"])
    optimizer.state = {}
    assert not optimizer.state and not optimizer.state_dict()["state"]
    model.run_train(**tokens())
    optimizer.step()
    assert len(optimizer.state) == len(params)


@pytest.mark.parametrize(
    ("dtype", "how"),
    [(torch.float32, "model first"), (torch.bfloat16, "optimizer first"), (torch.bfloat16, "pickle")],
    ids=str,
)
def test_a_copy_goes_on_alike(dtype: torch.dtype, how: str):
    for options in SETTINGS:
        assert copied(dtype, options, how) == [True] * 4


def test_an_optimizer_is_copied_alone():
    model, optimizer = training(llama, **ZERO1)
    goes_on(model, optimizer, tokens())
    twin = copy.deepcopy(optimizer)
    wanted = vars(next(model.parameters()))
    assert wanted.keys() <= vars(twin.param_groups[0]["params"][0]).keys()
    assert twin.group_names == optimizer.group_names and twin.grad_norm == optimizer.grad_norm
    for mine_, theirs in zip(optimizer.state.values(), twin.state.values(), strict=True):
        assert torch.equal(mine_["exp_avg"], theirs["exp_avg"]) and mine_["exp_avg"] is not theirs["exp_avg"]
    model.run_train(**tokens())
    assert twin.param_groups[0]["params"][0].grad is None
    assert copy.deepcopy(twin).names == optimizer.names


def test_hooks_on_a_state_dict():
    _, optimizer = momentum()
    seen: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda one: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "note": 1})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: {k: v for k, v in state.items() if k != "note"})
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append("loaded"))
    state = optimizer.state_dict()
    assert state["note"] == 1
    optimizer.load_state_dict(state)
    assert seen == ["saving", "loaded"]
