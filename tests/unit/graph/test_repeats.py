"""Layers that repeat are traced once, and the graph is the one that tracing each of them gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nxd_infer.graph.canonical import Graph, trace_graph
from nxd_infer.graph.export import Step, named_inputs

SIZE, LAYERS = 4, 4
X = torch.randn(2, SIZE)


class Cache(NamedTuple):
    keys: Tensor
    place: Tensor


class Layer(nn.Module):
    """Counts its runs in a list of the class."""

    nxd_repeats = True
    runs: list[int] = []

    def __init__(self, **given: Any):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.register_buffer("scale", torch.rand(SIZE))
        vars(self).update(given)

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            self.runs.append(1)
        return self.run(x, *others, **named)

    def run(self, x: Tensor) -> Any:
        return torch.relu(self.linear(x)) * self.scale


class Stack(nn.Module):
    """``calls(stack, x)`` is its forward."""

    def __init__(self, calls: Any, layers: list[nn.Module]):
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList(layers)
        for i in range(len(layers)):
            self.register_buffer(f"state_{i}", torch.zeros(2, SIZE))

    def forward(self, x: Tensor) -> Any:
        return self.calls(self, x)


def in_turn(stack: Stack, x: Tensor) -> Tensor:
    for layer in stack.layers:
        x = layer(x)
    return x


def graph(module: Stack, repeats: bool) -> tuple[Graph, int]:
    """Return the graph and how often a layer ran."""
    for layer in module.modules():
        if isinstance(layer, Layer):
            layer.nxd_repeats = repeats
    Layer.runs.clear()
    inputs, keyword = named_inputs(module.eval(), [X])
    states = [f"state_{i}" for i in range(LAYERS)] if isinstance(module.layers[0], Remembers) else []
    return trace_graph(Step(module, inputs, keyword, states)), len(Layer.runs)


def compare(module: Stack, runs: int) -> None:
    """Check that the layers ran ``runs`` times, and that the graph is the same without repeats."""
    found, ran = graph(module, True)
    wanted, _ = graph(module, False)
    assert found.ir() == wanted.ir()
    assert found.file == wanted.file
    assert found.structure == wanted.structure
    assert found.constants.keys() == wanted.constants.keys()
    assert all(torch.equal(value, wanted.constants[name]) for name, value in found.constants.items())
    assert ran == runs


class Remembers(Layer):
    def run(self, x: Tensor, cache: Cache, *, flag: bool = True) -> Any:  # pyright: ignore
        cache.keys.index_copy_(0, cache.place, x[:1])
        seen = cache.keys.view(-1, SIZE)
        return {"y": self.linear(x) + seen.sum() if flag else x + seen.sum(), "none": None, "more": (x * 2, 3)}


def remembering(stack: Stack, x: Tensor) -> Tensor:
    place = torch.zeros(1, dtype=torch.int64)
    for i, layer in enumerate(stack.layers):
        result = layer(x, Cache(getattr(stack, f"state_{i}"), place), flag=True)
        x = result["y"] + result["more"][0] * result["more"][1]
    return x


def under_autocast(stack: Stack, x: Tensor) -> Tensor:
    x = stack.layers[0](x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = stack.layers[2](stack.layers[1](x))
    with torch.no_grad():
        return stack.layers[3](y.float())


class Outer(Layer):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Layer(), Layer()])

    def run(self, x: Tensor) -> Any:
        return self.inner[1](self.inner[0](x)) + self.linear(x)


def in_branches(stack: Stack, x: Tensor) -> Tensor:
    def both(x: Tensor) -> Tensor:
        return stack.layers[2](stack.layers[1](x))

    return torch.cond(x.sum() > 0, both, lambda x: stack.layers[1](x), (stack.layers[0](x),))


def tied(stack: Stack, x: Tensor) -> Tensor:
    return stack.layers[0](stack.layers[0](stack.layers[1](x)))


@pytest.mark.parametrize(
    ("calls", "kind", "runs"),
    [
        (in_turn, Layer, 1),
        (remembering, Remembers, 1),
        (under_autocast, Layer, 1),
        (in_turn, Outer, 2),
        (tied, Layer, 1),
        (in_branches, Layer, 1),
    ],
    ids=["plain", "states", "regions", "nested", "one layer twice", "branches"],
)
def test_layers_that_repeat_run_once_and_give_the_same_graph(calls, kind, runs):
    compare(Stack(calls, [kind() for _ in range(LAYERS)]), runs)


class Scaled(Layer):
    factor: Any = 1.0

    def run(self, x: Tensor) -> Any:
        return self.linear(x) * (self.factor() if callable(self.factor) else self.factor)


class Constant(Layer):
    def run(self, x: Tensor) -> Any:
        return self.linear(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


class View(Layer):
    def run(self, x: Tensor) -> Any:
        return x.flatten()[: x.numel()].view(x.shape)


class Passes(Layer):
    def run(self, x: Tensor) -> Any:
        return x


class Parent(Layer):
    """Reads a tensor that is not its own: the parent's, in a closure."""

    def run(self, x: Tensor) -> Any:
        return self.linear(x) + self.parent()


def with_parent(stack: Stack, x: Tensor) -> Tensor:
    now = x * 3
    for layer in stack.layers:
        vars(layer)["parent"] = lambda: now
    try:
        return in_turn(stack, x)
    finally:
        for layer in stack.layers:
            del vars(layer)["parent"]


def other_layouts(stack: Stack, x: Tensor) -> Tensor:
    y = stack.layers[0](x)
    return stack.layers[1](torch.cat([y, y], 1)[:, :SIZE])


def _factor(value: float) -> Any:
    return lambda: value


@pytest.mark.parametrize(
    ("calls", "layers", "runs"),
    [
        (in_turn, [Scaled(factor=float(i)) for i in range(3)], 3),
        (in_turn, [Scaled(factor=_factor(i)) for i in (1, 1, 2)], 2),
        (in_turn, [Constant(), Constant()], 2),
        (in_turn, [View(), View()], 2),
        (in_turn, [Passes(), Layer(), Passes()], 3),
        (with_parent, [Parent(), Parent()], 1),
        (other_layouts, [Layer(), Layer()], 2),
        (in_turn, [Layer(), Layer(extra=nn.Identity()), Scaled()], 3),
    ],
    ids=[
        *("number", "closure", "constant", "view", "argument", "captured", "strides", "structure"),
    ],
)
def test_layers_that_code_can_tell_apart_are_traced_each(calls, layers, runs):
    compare(Stack(calls, layers), runs)
