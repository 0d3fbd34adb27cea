"""Lazy optimizers: groups and steps of those made from them are the plain optimizer's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nxd_infer.distributed import Parallelizer, make_optimizer_constructor_lazy
from nxd_infer.distributed.optimizers import ParameterMap
from nxd_infer.errors import ParallelConfigError

AdamW = torch.optim.AdamW


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def groups(m: nn.Module) -> list[dict[str, Any]]:
    named = list(m.named_parameters())
    return [
        {"params": (p for n, p in named if n.endswith("weight")), "weight_decay": 0.3},
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.5},
    ]


CALLS: dict[str, Callable[[Any, nn.Module], torch.optim.Optimizer]] = {
    "positional rate": lambda make, m: make(list(m.parameters()), 0.1),
    "groups": lambda make, m: make(groups(m), lr=0.1),
    "params=": lambda make, m: make(params=m.parameters(), lr=0.1, betas=(0.5, 0.6)),
    "one tensor in a group": lambda make, m: make([{"params": m[0].weight}, {"params": m[2].bias, "lr": 1.0}]),
    "names": lambda make, m: make(m.named_parameters(), lr=0.1),
}


def steps(m: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    for number in range(3):
        optimizer.zero_grad()
        m(torch.full((2, 4), number + 1.0)).square().sum().backward()
        optimizer.step()
    return m.state_dict()


def shape(optimizer: torch.optim.Optimizer, m: nn.Module) -> list[dict[str, Any]]:
    names = {id(p): name for name, p in m.named_parameters()}
    return [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_lazy_optimizer_becomes_the_plain_one(call):
    plain, before = model(), model()
    after = copy.deepcopy(before)
    wanted = call(AdamW, plain)
    lazy = call(make_optimizer_constructor_lazy(AdamW), before)
    assert isinstance(lazy, AdamW)
    assert sum(p.numel() for group in lazy.param_groups for p in group["params"]) == 0
    mapping = ParameterMap(dict(before.named_parameters()), dict(after.named_parameters()))
    made = Parallelizer.optimizer_for_mp(lazy, mapping)
    assert shape(made, after) == shape(wanted, plain)
    expected = steps(plain, wanted)
    for name, value in steps(after, made).items():
        assert torch.equal(value, expected[name])


def test_parameters_of_other_stages_are_left_out():
    before = model()
    mapping = {id(before[0].weight): nn.Parameter(torch.zeros(2, 4))}
    lazy = make_optimizer_constructor_lazy(AdamW)(groups(before), lr=0.1)
    made = Parallelizer.optimizer_for_mp(lazy, mapping)
    assert [len(group["params"]) for group in made.param_groups] == [1, 0]
    with pytest.raises(ParallelConfigError, match="parameter_mapping"):
        Parallelizer.optimizer_for_mp(lazy, {})


def test_a_regular_optimizer_keeps_its_groups_and_options():
    before = model()
    after = copy.deepcopy(before)
    plain = torch.optim.SGD(groups(before), lr=0.1, momentum=0.9)
    mapping = ParameterMap(dict(before.named_parameters()), dict(after.named_parameters()))
    made = Parallelizer.optimizer_for_mp(plain, mapping)
    assert shape(made, after) == shape(plain, before)
    assert made.defaults == plain.defaults
    assert Parallelizer.optimizer_for_mp(made, mapping) is made
    steps(before, plain)
    with pytest.raises(ParallelConfigError, match="before the first step"):
        Parallelizer.optimizer_for_mp(plain, mapping)
