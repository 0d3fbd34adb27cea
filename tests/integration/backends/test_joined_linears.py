"""Packed linears of one input become one call, and stay on their side of a write to what they read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import native
from nxd_infer.backends.cpu.options import PACKED_OPTION
from nxd_infer.graph.export import Step
from nxd_infer.graph.ir import Program
from nxd_infer.ops import packed
from tests.support.backends.packed_models import Siblings, three_of_one_input, with_and_without_a_bias
from tests.support.graph.exporting import entries, joined_calls
from tests.support.needs import needs_native

pytestmark = needs_native

Forward = Callable[[Any, Tensor], Tensor]
JOINED: dict[str, tuple[Forward, list[int]]] = {
    "three of one input": (three_of_one_input, [3]),
    "one of them twice": (lambda m, x: torch.cat((m.a(x), m.b(m.c(x).repeat(1, 2)), m.c(x)), -1), [3]),
    "with and without a bias": (with_and_without_a_bias, [2]),
    "each of its own": (lambda m, x: m.b(m.c(x).repeat(1, 2)), []),
}


def around(write: Callable[[Tensor], object]) -> Forward:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = x * 2
        before = (m.a(hidden), m.b(hidden))
        write(hidden)
        return torch.cat((*before, m.b(hidden), m.c(hidden)), -1)

    return forward


def _of_a_changing_state(m: Any, x: Tensor) -> Tensor:
    before = m.a(m.seen)
    m.seen.add_(x)
    return torch.cat((before, m.b(m.seen)), -1)


APART: dict[str, tuple[Forward, list[int]]] = {
    "a slice is set": (around(lambda h: h[:, 0].fill_(0)), [2, 2]),
    "a slice is multiplied": (around(lambda h: h[:, :4].mul_(3)), [2, 2]),
    "a flat view is zeroed": (around(lambda h: h.view(-1)[3:7].zero_()), [2, 2]),
    "the whole is added to": (around(lambda h: h.add_(1)), [2, 2]),
    "a state between them": (_of_a_changing_state, []),
}


class Each(nn.Module):
    """Every form with linears and an input of its own."""

    def __init__(self, forms: dict[str, tuple[Forward, list[int]]]):
        super().__init__()
        self.forms = nn.ModuleList(Siblings(forward) for forward, _ in forms.values())

    def forward(self, x: Tensor) -> list[Tensor]:
        return [form(x * (number + 1)) for number, form in enumerate(self.forms)]


def check(forms: dict[str, tuple[Forward, list[int]]]) -> None:
    module, x = Each(forms), torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    library = native.load()
    (lowered,) = entries([Step(module, {"x": x})], library, {PACKED_OPTION: 1})
    wanted = [size for _, sizes in forms.values() for size in sizes]
    assert sorted(joined_calls(lowered, library.op("packed_linears"))) == sorted(wanted)
    states = [torch.ones(spec.shape) for spec in lowered.graph.states]
    values = [
        packed.pack(module.get_parameter(spec.name).detach()) if spec.encoding else module.get_parameter(spec.name)
        for spec in lowered.graph.weights
    ]
    with torch.no_grad():
        found = Program(lowered.ir)(*states, x, *values)
        for name, one, other in zip(forms, found, module(x), strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")


def test_linears_of_one_input_become_one_call() -> None:
    check(JOINED)


def test_linears_stay_on_their_side_of_a_write_to_what_they_read() -> None:
    check(APART)
