"""Planning a pipeline leaves a model as it was, and finds values that leave a layer by another way than its result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.plan import Plan, make_plan
from nxd_infer.pipeline.stage import take_stage
from tests.support.pipeline.models import Called, Lazy

SIZE = 4


def plain(model: Any, x: Tensor) -> Tensor:
    return model.last(model.second(model.first(x)))


def used_through_a_dict(model: Any, x: Tensor) -> Tensor:
    store: dict[str, Tensor] = {}
    return model.last(model.second(model.first(x, store), store))


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


class Keeps(nn.Linear):
    """``how`` it keeps what it gives, beside returning it."""

    def __init__(self, how: str):
        super().__init__(SIZE, SIZE)
        self.how, self.kept = how, torch.zeros(2, SIZE)

    def forward(self, input: Tensor, into: Any = None) -> Tensor:
        found = super().forward(input)
        if self.how == "assigned":
            self.kept = found
        elif self.how == "in place":
            self.kept.copy_(found)
        elif self.how == "into":
            into["found"] = found
        return found


class Adds(nn.Linear):
    def forward(self, input: Tensor, store: dict[str, Tensor]) -> Tensor:
        return super().forward(input) + store.get("found", torch.zeros(()))


class Bag:
    """Not what torch looks into."""

    def __init__(self, x: Tensor):
        self.x = x


class Wraps(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        return Bag(super().forward(input))


class Unwraps(nn.Linear):
    def forward(self, bag: Bag) -> Tensor:
        return super().forward(bag.x)


class InPlace(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mul_(2))


def plan_of(model: nn.Module, cut: str = "first") -> tuple[Plan, nn.Module]:
    """Plan on the first of two ranks."""
    stage = take_stage(copy.deepcopy(model), [cut], 0, 2)
    return make_plan(stage, lambda: stage.module(torch.ones(2, SIZE)), lambda loss: loss), stage.module


@pytest.mark.parametrize("decides", [False, True])
def test_planning_leaves_the_model_as_it_was(decides: bool):
    model = Called(Lazy(decides), linear(), plain)
    plan, module = plan_of(model)
    assert [call.unit for call in plan.calls] == ["first", "second", "last"]
    lazy: Any = module.get_submodule("first")
    assert lazy.tables == {} and lazy.seen == [] and float(module.get_buffer("calls")) == 0


def test_what_stays_on_a_stage_may_go_any_way():
    plan_of(Called(Keeps("into"), Adds(SIZE, SIZE), used_through_a_dict), "second")
    plan_of(Called(Wraps(SIZE, SIZE), Unwraps(SIZE, SIZE), plain), "second")
    plan_of(Called(linear(), InPlace(SIZE, SIZE), plain), "second")


def used_outside(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) + model.first.kept


def is_the_loss(model: Any, x: Tensor) -> Tensor:
    plain(model, x)
    return model.first.kept


def changed_between(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    x += 1
    return model.last(model.second(x))


def changed_by_a_function(model: Any, x: Tensor) -> Tensor:
    return model.last(model.second(nn.functional.relu(model.first(x), inplace=True)))


LEAVES = "a value leaves the layer 'first' by another way than its result, and is used"
CHANGES = "the code between the layers changes a layer's result or a weight in place"


@pytest.mark.parametrize(
    ("first", "second", "call", "message"),
    [
        (Keeps("assigned"), linear(), used_outside, f"{LEAVES} outside of it \\(add\\): return it from"),
        (Keeps("in place"), linear(), used_outside, f"{LEAVES} outside of it \\(add\\)"),
        (Keeps("assigned"), linear(), is_the_loss, f"{LEAVES} outside of it \\(square\\)"),
        (Keeps("into"), Adds(SIZE, SIZE), used_through_a_dict, f"{LEAVES} in 'second', on another stage"),
        (Wraps(SIZE, SIZE), Unwraps(SIZE, SIZE), plain, f"{LEAVES} in 'second', on another stage \\(linear\\)"),
        (linear(), linear(), changed_between, f"{CHANGES} \\(add_\\), .*: use an operation that makes a new"),
        (linear(), linear(), changed_by_a_function, f"{CHANGES} \\(relu\\)"),
        (
            linear(),
            InPlace(SIZE, SIZE),
            plain,
            "'second' changes in place what it is given, the result of 'first'",
        ),
    ],
)
def test_what_a_pipeline_cannot_hand_on(first: nn.Module, second: nn.Module, call: Any, message: str):
    with pytest.raises(ParallelConfigError, match=message):
        plan_of(Called(first, second, call))
