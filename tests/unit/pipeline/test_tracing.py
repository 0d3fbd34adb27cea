"""``tracer_cls``: a tracer records the code around the layers, and what it is told to leave alone it leaves alone."""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from nxd_infer.errors import InputMismatchError, ParallelConfigError
from nxd_infer.pipeline.microbatches import named_inputs
from nxd_infer.pipeline.options import PipelineOptions
from nxd_infer.pipeline.tracing import log_once, say_what_has_no_effect, trace_around_units

CUTS = ["layers.0"]


def deciding(x: Tensor) -> Tensor:
    """What a tracer cannot follow."""
    return x if x.sum() > 0 else -x


class Head:
    def apply(self, x: Tensor) -> Tensor:
        return deciding(x)


class Gate(nn.Module):
    """Without weights, so it belongs to no stage."""

    def forward(self, x: Tensor) -> Tensor:
        return deciding(x)


class Model(nn.Module):
    def __init__(self, between: Any = None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.gate = Gate()
        self.scale = nn.Parameter(torch.ones(4))
        self.between = between

    def forward(self, x: Tensor, more: Tensor | None = None, times: int = 2) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.between is not None:
                x = self.between(self, x)
        if more is not None:
            x = x + more
        return (x * self.scale * times).square().mean()


def by_name(model: Model, x: Tensor) -> Tensor:
    return deciding(x)


def by_method(model: Model, x: Tensor) -> Tensor:
    return HEAD.apply(x)


def by_child(model: Model, x: Tensor) -> Tensor:
    return model.gate(x)


HEAD = Head()
MODULE = sys.modules[__name__]


class Noting(fx.Tracer):
    seen: list[str] = []

    def call_module(self, m: nn.Module, *args: Any, **kwargs: Any) -> Any:
        Noting.seen.append(type(m).__name__)
        return super().call_module(m, *args, **kwargs)


class Plain(fx.Tracer):
    """One that is made without arguments."""

    def __init__(self):
        super().__init__()


def traced(model: nn.Module, **options: Any) -> nn.Module:
    model = copy.copy(model)
    trace_around_units(model, CUTS, PipelineOptions({"tracer_cls": "torch", **options}))
    return model


@pytest.mark.parametrize(
    ("between", "options"),
    [
        (None, {}),
        (None, {"tracer_cls": "hf"}),
        (by_name, {"autowrap_functions": (deciding,)}),
        (by_name, {"autowrap_modules": [deciding], "autowrap_functions": [sys.modules[__name__]]}),
        (by_method, {"autowrap_obj_methods": {HEAD: ["apply"]}}),
        (by_child, {"leaf_module_cls": [Gate], "tracer_cls": Noting}),
        (None, {"tracer_cls": Plain}),
    ],
)
def test_what_is_traced_runs_as_before(between: Any, options: dict[str, Any]):
    model, x = Model(between), torch.randn(3, 4)
    if between is not None:
        without = {"tracer_cls": options.get("tracer_cls", "torch")}
        with pytest.raises(ParallelConfigError, match=r"symbolically traced variables.*or leave tracer_cls out"):
            traced(model, **without)
    Noting.seen.clear()
    found = traced(model, **options)
    assert torch.equal(found(x), model(x)) and torch.equal(found(-x), model(-x))
    assert isinstance(found, Model) and found.state_dict().keys() == model.state_dict().keys()
    assert "apply" not in vars(HEAD)
    assert bool(Noting.seen) == (options.get("tracer_cls") is Noting)


def test_the_inputs_are_those_that_were_named():
    model, x = Model(), torch.randn(3, 4)
    found = traced(model, input_names=["x", "more"])
    assert torch.equal(found(x, x), model(x, x)) and torch.equal(found(x=x, more=x), model(x, x))
    assert list(inspect.signature(found.forward).parameters) == ["x", "more"]
    with pytest.raises(InputMismatchError, match=r"'more' is not in the parameters of the model's forward: x$"):
        named_inputs(traced(model), None, (), {"x": x, "more": x})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tracer_cls": "fx"}, 'must be "hf", "torch", a class derived from torch.fx.Tracer, or None'),
        ({"tracer_cls": Model}, "a class derived from torch.fx.Tracer, or None, got .*Model"),
        ({"tracer_cls": Plain, "autowrap_functions": [deciding]}, "tracer_cls=Plain does not take autowrap_modules"),
        ({"autowrap_functions": deciding}, "must be a list or tuple of Python modules and func"),
        ({"autowrap_obj_methods": {HEAD: ["nothing"]}}, "a dict of objects with lists of the names of their methods"),
    ],
)
def test_what_does_not_trace(options: dict[str, Any], message: str):
    with pytest.raises(ParallelConfigError, match=message):
        traced(Model(), **options)


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    given = PipelineOptions({"autowrap_modules": [MODULE], "fuse_microbatches": True})
    for _ in range(2):
        say_what_has_no_effect(given)
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "pipeline_config: autowrap_modules: no effect without tracer_cls, since nothing is traced",
        "pipeline_config: fuse_microbatches: no effect, since microbatches run one by one, in the schedule's order",
    ]
    say_what_has_no_effect(PipelineOptions({"autowrap_modules": [MODULE], "tracer_cls": "torch"}))
    assert len(caplog.records) == 2
