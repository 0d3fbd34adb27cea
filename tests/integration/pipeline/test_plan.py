"""Planning a pipeline leaves a model as it was, and finds values that leave a layer by another way than its result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.pipeline import NxDPPModel
from nxd_infer.pipeline.plan import Plan, make_plan
from nxd_infer.pipeline.stage import take_stage
from tests.support.ranks import run_ranks

SIZE = 4


class Model(nn.Module):
    """Three layers, called as a test says."""

    def __init__(self, first: nn.Module, second: nn.Module, call: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.first, self.second, self.last = first, second, nn.Linear(SIZE, SIZE)
        self.register_buffer("calls", torch.zeros(()))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.call(self, x).square().mean()


def plain(model: Any, x: Tensor) -> Tensor:
    return model.last(model.second(model.first(x)))


def linear() -> nn.Linear:
    return nn.Linear(SIZE, SIZE)


def test_a_model_of_one_layer_is_refused():
    with pytest.raises(ParallelConfigError, match="Linear has no module with weights inside"):
        NxDPPModel(linear())


class Lazy(nn.Linear):
    """Makes a table at its first call, after something that the meta device cannot do."""

    def __init__(self, decides: bool = False):
        super().__init__(SIZE, SIZE)
        self.decides = decides
        self.tables: dict[int, Tensor] = {}
        self.seen: list[Tensor] = []

    def forward(self, input: Tensor) -> Tensor:
        if SIZE not in self.tables:
            self.tables[SIZE] = torch.arange(SIZE, dtype=input.dtype, device=input.device)
        self.seen.append(input)
        if self.decides and float(input.sum()) > 1e9:
            return input
        return super().forward(input) + self.tables[SIZE]


class Keeps(nn.Linear):
    """``how`` it keeps what it gives, beside returning it."""

    def __init__(self, how: str):
        super().__init__(SIZE, SIZE)
        self.how, self.kept = how, torch.zeros(2, SIZE)
        self.several: list[Tensor] = []

    def forward(self, input: Tensor, into: Any = None) -> Tensor:
        found = super().forward(input)
        if self.how == "decided" and float(found.sum()) > 1e9:
            return found
        if self.how in ("assigned", "decided"):
            self.kept = found
        elif self.how == "in place":
            self.kept.copy_(found)
        elif self.how == "listed":
            self.several.append(found)
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


class Masked(nn.Linear):
    """Takes a value from an attribute that the model sets."""

    mask: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.mask


class InPlace(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.mul_(2))


def plan_of(model: nn.Module, cut: str = "first") -> tuple[Plan, nn.Module]:
    """Plan on the first of two ranks."""
    stage = take_stage(copy.deepcopy(model), [cut], 0, 2)
    return make_plan(stage, lambda: stage.module(torch.ones(2, SIZE)), lambda loss: loss), stage.module


@pytest.mark.parametrize("decides", [False, True])
def test_planning_leaves_the_model_as_it_was(decides: bool):
    model = Model(Lazy(decides), linear(), plain)
    plan, module = plan_of(model)
    assert [call.unit for call in plan.calls] == ["first", "second", "last"]
    lazy: Any = module.get_submodule("first")
    assert lazy.tables == {} and lazy.seen == [] and float(module.get_buffer("calls")) == 0


def test_a_value_that_is_set_as_an_attribute_is_handed():
    def call(model: Any, x: Tensor) -> Tensor:
        x = model.first(x)
        model.last.mask = x + 1
        return model.last(model.second(x))

    model = Model(linear(), linear(), call)
    model.last = Masked(SIZE, SIZE)
    assert plan_of(model, "second")[0].handed == ((), ((0, 0), (1, 0)))


def test_what_stays_on_a_stage_may_go_any_way():
    def call(model: Any, x: Tensor) -> Tensor:
        store: dict[str, Tensor] = {}
        return model.last(model.second(model.first(x, store), store))

    plan_of(Model(Keeps("into"), Adds(SIZE, SIZE), call), "second")
    plan_of(Model(Wraps(SIZE, SIZE), Unwraps(SIZE, SIZE), plain), "second")


def used_outside(model: Any, x: Tensor) -> Tensor:
    return plain(model, x) + model.first.kept


def used_as_argument(model: Any, x: Tensor) -> Tensor:
    return model.last(model.second(model.first(x)) * 0 + 1) + model.second(model.first.several[0])


def used_through_a_dict(model: Any, x: Tensor) -> Tensor:
    store: dict[str, Tensor] = {}
    return model.last(model.second(model.first(x, store), store))


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
        (Keeps("decided"), linear(), used_outside, f"{LEAVES} outside of it \\(add\\)"),
        (Keeps("in place"), linear(), used_outside, f"{LEAVES} outside of it \\(add\\)"),
        (Keeps("assigned"), linear(), is_the_loss, f"{LEAVES} outside of it \\(square\\)"),
        (Keeps("listed"), linear(), used_as_argument, f"{LEAVES} in 'second', on another stage: return it from"),
        (Keeps("into"), Adds(SIZE, SIZE), used_through_a_dict, f"{LEAVES} in 'second', on another stage"),
        (Wraps(SIZE, SIZE), Unwraps(SIZE, SIZE), plain, f"{LEAVES} in 'second', on another stage \\(linear\\)"),
        (linear(), linear(), changed_between, f"{CHANGES} \\(add_\\), .*: use an operation that makes a new"),
        (linear(), linear(), changed_by_a_function, f"{CHANGES} \\(relu\\)"),
        (
            linear(),
            InPlace(SIZE, SIZE),
            plain,
            "'second' changes in place what it is given, the result of 'first' on an",
        ),
    ],
)
def test_what_a_pipeline_cannot_hand_on(first: nn.Module, second: nn.Module, call: Any, message: str):
    with pytest.raises(ParallelConfigError, match=message):
        plan_of(Model(first, second, call))


def test_a_layer_of_the_same_stage_may_change_what_it_is_given():
    plan_of(Model(linear(), InPlace(SIZE, SIZE), plain), "second")


# --- on two stages ---------------------------------------------------------------------------------------------


class Counts(nn.Linear):
    """Returns a number beside its tensor: ``of`` its input's values, or always the same."""

    def __init__(self, of: bool):
        super().__init__(SIZE, SIZE)
        self.of = of

    def forward(self, input: Tensor) -> tuple[Tensor, float]:
        return super().forward(input), float(input.sum()) if self.of else 2.0


def counted(model: Any, x: Tensor) -> Tensor:
    x, number = model.first(x)
    return model.last(model.second(x * number))


def masked(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    model.last.mask = torch.sigmoid(x)
    return model.last(model.second(x))


def on_two_stages() -> list[str]:
    """What differs from one process, and what the value of a number that cannot be handed is told."""
    torch.set_default_dtype(torch.float64)
    found = []
    models = {
        "lazy": Model(Lazy(), Lazy(True), plain),
        "number": Model(Counts(False), linear(), counted),
        "attribute": Model(linear(), linear(), masked),
    }
    models["attribute"].last = Masked(SIZE, SIZE)
    x = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(1))
    for name, model in models.items():
        pipelined = NxDPPModel(copy.deepcopy(model), num_microbatches=3, pipeline_cuts=["first"])
        loss = model(x)
        loss.backward()
        for _ in range(2):
            pipelined.zero_grad()
            torch.testing.assert_close(pipelined.run_train(x), loss.detach())
        for path, parameter in pipelined.local_named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(path).grad, msg=f"{name} {path}")
    wrong = NxDPPModel(Model(Counts(True), linear(), counted), num_microbatches=3, pipeline_cuts=["first"])
    try:
        wrong.run_train(x)
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_numbers_and_attributes_on_two_stages():
    first, second = run_ranks(on_two_stages, 2, pp=2)
    assert first[0].startswith(InputMismatchError.__name__ + ": 'first' gave the Python value ")
    assert first[0].endswith(
        "where its shapes promised 0.0, and only tensors are handed to other stages: return a tensor"
    )
    assert (
        second[0].startswith("CollectiveError: pipeline stage 0 (rank 0) failed:\nTraceback") and first[0] in second[0]
    )
