"""The wrapped optimizer through its wrapper: attributes, methods, state under the model's parameters, copies, hooks."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.optimizer import NxDOptimizer
from tests.support.optimizer.momentum import SETTINGS, Momentum, momentum
from tests.support.trainer.jobs import AdamW, training
from tests.support.trainer.models import decoder, mlp, tokens, vectors


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


def goes_on(model: Any, optimizer: Any, batch: dict) -> list[torch.Tensor]:
    for _ in range(2):
        optimizer.zero_grad()
        model.run_train(**batch)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("dtype", "copy_of", "options"),
    [
        (torch.float32, copy.deepcopy, SETTINGS[0]),
        (torch.bfloat16, lambda pair: copy.deepcopy(pair[::-1])[::-1], SETTINGS[1]),  # the optimizer first
        (torch.bfloat16, lambda pair: pickle.loads(pickle.dumps(pair)), SETTINGS[2]),
    ],
    ids=["model first", "optimizer first", "pickle"],
)
def test_a_copy_goes_on_alike(dtype: torch.dtype, copy_of: Any, options: dict):
    """A copy of a model with its optimizer trains on as the original does, and neither touches the other."""
    build = mlp if dtype == torch.float32 else partial(decoder, "tied", dtype)
    batch = vectors() if dtype == torch.float32 else tokens()
    model, optimizer = training(build, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = goes_on(model, optimizer, batch)
    scheduler.step()
    twin, other = copy_of((model, optimizer))
    assert type(other) is type(optimizer) and type(other.optimizer) is AdamW
    assert [id(p) for p in other.param_groups[0]["params"]] == [id(p) for p in twin.parameters()]
    assert other.param_groups[0]["lr"] == 5e-3 and len(other.state) == len(optimizer.state)
    theirs = goes_on(twin, other, batch)
    assert all(map(torch.equal, before, model.parameters()))
    ours = goes_on(model, optimizer, batch)
    assert all(map(torch.equal, theirs, ours)) and not all(map(torch.equal, before, ours))
    assert other.names == optimizer.names and other.state_dict().keys() == optimizer.state_dict().keys()


class Uphill(torch.optim.SGD):
    """It evaluates the model where its gradients lead, in the middle of a step."""

    def step(self, *, closure: Any) -> Any:
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1.0)
        return closure()


def test_an_optimizer_that_calls_the_closure_in_the_middle_of_a_step_is_refused():
    weight = nn.Parameter(torch.ones(2))

    def closure() -> torch.Tensor:
        loss = weight.sum()
        loss.backward()
        return loss

    with pytest.raises(ParallelConfigError, match="Uphill evaluates the model in the middle of a step"):
        NxDOptimizer([weight], Uphill, defaults={"lr": 0.1}).step(closure=closure)
