"""What is fused in graphs of plain PyTorch: the results are those of the operators one by one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nxd_infer import native
from nxd_infer.backends.cpu.lower import PROGRAM_FILE, lower
from nxd_infer.backends.cpu.program import native_program
from nxd_infer.graph.canonical import trace_graph
from nxd_infer.graph.export import Step
from nxd_infer.graph.ir import Program
from tests.support.graph.exporting import Entry, entries
from tests.support.needs import needs_native

pytestmark = needs_native

WIDTH = 24
VIEWS = {"view", "slice", "transpose", "unsqueeze", "chunk", "split", "getitem", "select", "reshape"}
Forward = Callable[[Any, Tensor, Tensor], Any]


class Block(nn.Module):
    """Weights, a state [4, 24], and what ``forward`` makes of them and of x, y [2, 3, 24]."""

    def __init__(self, forward: Forward, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(WIDTH).to(dtype) + 0.5)
        self.bias = nn.Parameter(torch.randn(WIDTH).to(dtype))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH).to(dtype))
        self.register_buffer("cos", torch.rand(1, 3, 1, 4).to(dtype))
        self.register_buffer("sin", torch.rand(1, 3, 1, 4).to(dtype))
        self.register_buffer("state", torch.randn(2, 3, WIDTH).to(dtype))
        self.how = forward

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.how(self, x, y)


def rms(m: Any, x: Tensor) -> Tensor:
    wide = x.float()
    return m.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def norm_after_sum(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    together = x + y
    return together, F.linear(rms(m, together), m.matrix)


def halves(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Rotary as our families write it."""
    first, second = x.view(2, 3, 3, 8).chunk(2, -1)
    return torch.cat((first * m.cos - second * m.sin, second * m.cos + first * m.sin), -1)


def turned(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Rotary as transformers writes it, of heads before positions."""
    heads = x.view(2, 3, 3, 8).transpose(1, 2)
    cos, sin = (torch.cat((table, table), -1).transpose(1, 2) for table in (m.cos, m.sin))
    rotated = torch.cat((-heads[..., 4:], heads[..., :4]), -1)
    return ((heads * cos) + (rotated * sin)).transpose(1, 2)


def gelu_new(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0)))) * y


def twice(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The tables of two layers are computed once."""
    return tuple(one * torch.erf(y * 3).exp() + torch.erf(y * 3).exp() for one in (x, x + 1))  # pyright: ignore[reportReturnType]


def pieces_for_others(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    together = (x + y) * m.weight
    first, second = together.chunk(2, -1)
    return first.contiguous() @ first.mT, second * 2 + first


def state_between(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What is read before a state is written, and after."""
    before = m.state * 2 + x
    m.state.copy_(before + y)
    return before, m.state * 2 + x


def branches(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a, b: F.silu(a) * b + b, lambda a, b: a * b - b, (x, y))


CASES: dict[str, tuple[Forward, int, int]] = {
    # the function; operators that are left besides fused ones and views; calls of the fused operator
    "RMSNorm after a sum": (norm_after_sum, 1, 1),
    "torch's RMSNorm": (lambda m, x, y: F.rms_norm(x + y, (WIDTH,), m.weight, 1e-5), 0, 1),
    "LayerNorm after a sum": (lambda m, x, y: F.layer_norm(x + y, (WIDTH,), m.weight, m.bias), 0, 1),
    "LayerNorm of nothing else": (lambda m, x, y: F.layer_norm(x * y, (WIDTH,)), 0, 1),
    "gate with SiLU": (lambda m, x, y: F.silu(x) * y, 0, 1),
    "gate with GELU": (lambda m, x, y: F.gelu(x) * y, 0, 1),
    "gate with GELU by tanh": (lambda m, x, y: F.gelu(x, approximate="tanh") * y, 0, 1),
    "GELU of GPT-2": (gelu_new, 0, 1),
    "rotary by halves": (halves, 0, 1),
    "rotary turned": (turned, 0, 3),
    "softmax with a bias": (lambda m, x, y: torch.softmax(x * 0.3 + m.bias, -1).to(x.dtype), 0, 1),
    "numbers": (lambda m, x, y: (1 - x) / 4 + 2 / (y.square() + 1), 1, 1),
    "columns for others": (pieces_for_others, 3, 2),
    "what is computed twice": (twice, 1, 2),
    "a state between": (state_between, 3, 2),
    "branches": (branches, 3, 0),
    "one operator alone": (lambda m, x, y: F.linear(torch.tanh(x), m.matrix), 1, 1),
}


def run(entry: Entry, module: Block, inputs: list[Tensor], kind: Any) -> list[Tensor]:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    states = [own[spec.name].detach().clone() for spec in entry.graph.states]
    weights = [own[spec.name].detach() for spec in entry.graph.weights]
    program = Program(entry.ir)
    if kind is Program:
        return [*program(*states, *inputs, *weights), *states]
    made = native_program(program)
    made.hold([state.clone() for state in states], weights)
    made.run(inputs)  # of which it learns
    made.hold(states, weights)
    return [*made.run(inputs), *states]


def operators(ir: dict[str, Any]) -> list[str]:
    return [node[0].split(".")[-2] if "." in node[0] else node[0] for node in ir["nodes"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_what_is_fused_computes_the_same(name: str, dtype: torch.dtype) -> None:
    forward, others, calls = CASES[name]
    module = Block(forward, dtype)
    x, y = torch.randn(2, 3, WIDTH).to(dtype), torch.randn(2, 3, WIDTH).to(dtype)
    step = [Step(module, {"x": x, "y": y}, states=["state"] if name == "a state between" else [])]
    (plain,), (fused,) = entries(step), entries(step, native.load())
    expected = run(plain, module, [x, y], Program)
    for kind in (Program, native_program):
        for a, b in zip(run(fused, module, [x, y], kind), expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.allclose(a.float(), b.float(), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
            if name in ("rotary by halves", "rotary turned", "columns for others", "a state between"):
                assert torch.equal(a, b)
    left = operators(fused.ir)
    assert left.count("fused") == calls
    assert len([one for one in left if one not in VIEWS | {"fused"}]) == others, left


def bits(x: Tensor) -> Tensor:
    x = x.masked_fill(x.isnan(), float("nan")) if x.is_floating_point() else x  # one of them
    return x.contiguous().view(-1).view(torch.uint8)


def compare(forward: Forward, x: Tensor, y: Tensor) -> Any:
    """Check that the fused graph has the bits of the one that is not, in both loops, at the first call and after."""
    module = Block(forward, x.dtype)
    graph = trace_graph(Step(module, {"x": x, "y": y}))
    (plain,), (fused,) = lower([graph], {}, None), lower([graph], {}, native.load())
    own = {**dict(module.named_parameters()), **dict(module.named_buffers()), **graph.constants}
    values = [x, y, *(own[spec.name].detach() for spec in fused.graph.weights)]
    expected = Program(json.loads(plain.files[PROGRAM_FILE]))(*values)
    program = Program(json.loads(fused.files[PROGRAM_FILE]))
    made = native_program(program)
    made.hold([], values[2:])
    for found in (program(*values), made.run([x, y]), made.run([x, y])):
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            assert torch.equal(bits(a), bits(b))
    return made


def many(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Each part of bfloat16 is copied first."""
    wide = x.float()
    return y + sum(torch.cat([wide] * count, -1)[..., :WIDTH] for count in range(60, 110))


EDGES: dict[str, Forward] = {
    "parts of no width": lambda m, x, y: torch.cat([x[..., :0], x], -1) * 2 + 1,
    "more columns than there are": lambda m, x, y: (x * 2)[..., -100:] + y[..., -100:100],
    "one column of a wider type": lambda m, x, y: x.float()[..., :1] * x.float() + x.float().chunk(24, -1)[3],
    "pieces of other dimensions": lambda m, x, y: sum(x.chunk(3, 1)) * 2 + sum((y * 3).split(1, 0)),
    "zeros of both signs": lambda m, x, y: 1 / (x * 0.0 + 0.0) - 1 / (x.abs() * -0.0 + -0.0),
    "a number that is too small": lambda m, x, y: x * 2 + 1e-320,
    "a row that is too wide": lambda m, x, y: (x.reshape(-1)[:1].expand(5_000_000) * 2 + 1)[:2],
    "more than a program holds": many,
    "softmax of what is rounded first": lambda m, x, y: torch.softmax(x * 8, -1, dtype=torch.bfloat16) + 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, dtype: torch.dtype) -> None:
    compare(EDGES[name], torch.randn(2, 3, WIDTH).to(dtype), torch.randn(2, 3, WIDTH).to(dtype))


def test_equal_results_are_computed_apart() -> None:
    """A caller may change one of them."""
    x = torch.randn(2, 3, WIDTH)
    one, other = compare(lambda m, x, y: ((x @ y.mT).view(-1), (x @ y.mT).view(-1)), x, x).run([x, x])
    assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_memory_with_the_negative_of_its_values() -> None:
    x, y = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    negative = torch.ops.aten._neg_view(y)  # as the imaginary part of what is conjugated is
    made = compare(lambda m, x, y: x * 2 + y, x, y)
    assert torch.equal(made.run([x, negative])[0], made.run([x, -y])[0])


def grown(seed: int) -> Forward:
    """A random function of x and y [2, 3, 24], of operators that are exact. What PyTorch refuses in the first call is
    left out in others."""
    refused: set[int] = set()

    def forward(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        choose, made = random.Random(seed), [x + y, x * m.weight]
        values = [one.clone() for one in (x, y, m.weight, m.cos)]
        for number in range(choose.randint(4, 24)):
            apply = random_operator(choose, choose.choice(values + made[-4:]), choose.choice(values + made[-4:]))
            try:
                made += [] if number in refused else [apply()]
            except (RuntimeError, IndexError):
                refused.add(number)
        return (*(one * 1 for one in made if choose.random() < 0.4), made[-1] + 1)

    return forward


def random_operator(choose: random.Random, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    dim, number = choose.choice([-1, -1, -1, 0, 1]), choose.choice([0.5, 2, -0.0, 0, -3.25, True])
    begin, end = choose.choice([None, 1, -2, -50]), choose.choice([None, 2, -1, 50])
    columns = (..., slice(begin, end), *([slice(None)] * choose.choice([0, 0, 1])))
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])
    arithmetic = [
        *(lambda: a + b, lambda: a - b, lambda: a * b, lambda: a * b + a, lambda: a * number, lambda: a - number),
        *(lambda: a / (b.abs() + 1), lambda: number - a, lambda: torch.add(a, b, alpha=2), lambda: -a),
        *(lambda: a.relu(), lambda: a.abs(), lambda: a.square(), lambda: a.amax(dim, keepdim=True)),
    ]
    columns_of = [
        *(lambda: a[columns], lambda: a[columns], lambda: a.chunk(3, dim)[1], lambda: a.split(5, dim)[-1]),
        *(lambda: torch.cat([a, b], dim), lambda: torch.cat([a, a * 2], dim), lambda: a.to(dtype), lambda: a.to(dtype)),
    ]
    others = [
        *(lambda: a.transpose(0, dim), lambda: a.unsqueeze(0), lambda: a.reshape(-1, 4), lambda: a.flatten()),
        *(lambda: a.expand(2, 3, 24), lambda: (a > b).long(), lambda: a.clone().add_(b), lambda: (a * 1).mul_(2)),
        *(lambda: a.amax() + b, lambda: torch.maximum(a, b), lambda: a.mul_(2), lambda: a.add_(b)),
    ]
    return choose.choice(choose.choice([arithmetic, arithmetic, columns_of, others]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_random_functions(seed: int, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    x, y, forward = torch.randn(2, 3, WIDTH).to(dtype), torch.randn(2, 3, WIDTH).to(dtype), grown(seed)
    with torch.no_grad():
        forward(Block(forward, dtype), x, y)
    compare(forward, x, y)
