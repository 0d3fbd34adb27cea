"""Packed linears of one input become one call, and stay on their side of a write to what they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer import native
from nxd_infer.backends.cpu.options import PACKED_OPTION
from nxd_infer.graph.export import Step
from nxd_infer.graph.ir import Program
from nxd_infer.ops import packed
from tests.support.graph.exporting import entries, joined_calls
from tests.support.needs import needs_native

pytestmark = needs_native

Forward = Callable[[Any, Tensor], Tensor]


class Siblings(nn.Module):
    """Linears that read one input, and one that reads it after the input has changed in place."""

    def __init__(self, forward: Forward):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("a", "b", "c"):
            layer = nn.Linear(8, 6 if name == "a" else 4)
            nn.init.normal_(layer.weight, generator=generator)
            nn.init.normal_(layer.bias, generator=generator)
            setattr(self, name, layer)
        self.register_buffer("seen", torch.zeros(5, 8))
        self.how = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def _of_a_changing_state(m: Any, x: Tensor) -> Tensor:
    before = m.a(m.seen)
    m.seen.add_(x)
    return torch.cat((before, m.b(m.seen)), -1)


SIBLINGS: dict[str, tuple[Forward, list[int]]] = {
    "three of one input": (lambda m, x: torch.cat((m.a(x), m.b(x), m.c(x)), -1), [3]),
    "one of them twice": (lambda m, x: torch.cat((m.a(x), m.b(m.c(x).repeat(1, 2)), m.c(x)), -1), [3]),
    "with and without a bias": (
        lambda m, x: torch.cat((m.a(x), F.linear(x, m.b.weight), F.linear(x, m.c.weight)), -1),
        [2],
    ),
    "each of its own": (lambda m, x: m.b(m.c(x).repeat(1, 2)), []),
}


@pytest.mark.parametrize("name", SIBLINGS)
def test_linears_of_one_input_become_one_call(name: str) -> None:
    forward, groups = SIBLINGS[name]
    module, x = Siblings(forward), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    library = native.load()
    (lowered,) = entries([Step(module, {"x": x})], library, {PACKED_OPTION: 1})
    assert joined_calls(lowered, library.op("packed_linears")) == groups
    values = [
        packed.pack(module.get_parameter(spec.name).detach()) if spec.encoding else module.get_parameter(spec.name)
        for spec in lowered.graph.weights
    ]
    with torch.no_grad():
        torch.testing.assert_close(Program(lowered.ir)(x, *values)[0], module(x))


class Two(nn.Module):
    """Two of them, each with layers of its own, in one graph: compiling takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.three = Siblings(SIBLINGS["three of one input"][0])
        self.biased = Siblings(SIBLINGS["with and without a bias"][0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.three(x), self.biased(x)


def two() -> tuple[nn.Module, dict[Any, int]]:
    return Two(), {}


@pytest.mark.parametrize("quantize", [False, True])
def test_compiled_linears_of_one_input_are_called_directly(
    quantize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")  # what the compiler writes is looked at
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    module = Two()
    options = {"quantize": "int8"} if quantize else {}
    with nxd.trace.parallel_model_trace(
        two,
        x,
        tp_degree=1,
        backend="inductor",
        compiler_args=["nxd_packed=1"],
        compiler_workdir=tmp_path,
        checkpoint_loader_callable=module.state_dict,
        inline_weights_to_neff=False,
        **options,
    ) as model:
        for found, expected in zip(model(x), module(x), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.1 if quantize else 1e-5)
    (wrapper,) = tmp_path.rglob("*.wrapper.cpp")
    called = "packed_int8_linears" if quantize else "packed_linears"
    assert wrapper.read_text().count(f"(aoti_torch_cpu_{called}(") == 2


def test_linears_of_a_state_that_changes_between_them_stay_apart() -> None:
    module, x = Siblings(_of_a_changing_state), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    library = native.load()
    (lowered,) = entries([Step(module, {"x": x}, states=["seen"])], library, {PACKED_OPTION: 1})
    values = [
        packed.pack(module.get_parameter(spec.name).detach()) if spec.encoding else module.get_parameter(spec.name)
        for spec in lowered.graph.weights
    ]
    state = torch.ones(5, 8)
    with torch.no_grad():
        wanted = torch.cat((module.a(torch.ones(5, 8)), module.b(torch.ones(5, 8) + x)), -1)
        torch.testing.assert_close(Program(lowered.ir)(state, x, *values)[0], wanted)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "a slice is set": lambda h: h[:, 0].fill_(0),
    "a slice is multiplied": lambda h: h[:, :4].mul_(3),
    "a flat view is zeroed": lambda h: h.view(-1)[3:7].zero_(),
    "the whole is added to": lambda h: h.add_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_linears_stay_on_their_side_of_a_write_to_what_they_read(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x * 2
        before = (m.a(hidden), m.b(hidden))
        WRITES[name](hidden)
        return torch.cat((*before, m.b(hidden), m.c(hidden)), -1)

    module, x = Siblings(forward), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    library = native.load()
    (lowered,) = entries([Step(module, {"x": x})], library, {PACKED_OPTION: 1})
    assert joined_calls(lowered, library.op("packed_linears")) == [2, 2]
    values = [
        packed.pack(module.get_parameter(spec.name).detach()) if spec.encoding else module.get_parameter(spec.name)
        for spec in lowered.graph.weights
    ]
    with torch.no_grad():
        torch.testing.assert_close(Program(lowered.ir)(x, *values)[0], module(x))
