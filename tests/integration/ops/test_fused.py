"""The fused operator, compared with its reference: in bits where functions are exact, in float64 where they are not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxd_infer import native
from nxd_infer.ops.fused import BINARY, REDUCTIONS, UNARY, fused_fake
from tests.support.needs import needs_native
from tests.support.ops.fused_reference import fused_reference

pytestmark = needs_native

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXACT = ["neg", "abs", "square", "reciprocal", "relu", "copy"]


@pytest.fixture(scope="module")
def fused() -> Any:
    return native.load().op("fused")


def bits(x: Tensor) -> Tensor:
    x = x.contiguous().masked_fill(x.isnan(), float("nan"))  # one of them
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    plain = all(a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() for a, b in pairs)
    return plain and all(torch.equal(bits(a), bits(b)) for a, b in pairs)


@pytest.mark.smoke
@pytest.mark.parametrize(("dtype", "width"), [("float32", 17), ("bfloat16", 1030)])
@pytest.mark.parametrize("name", UNARY)
def test_a_function_of_one_value(fused: Any, name: str, dtype: str, width: int) -> None:
    x = torch.cat(
        [torch.linspace(-12, 12, 3 * width - 9), torch.tensor([0.0, -0.0, 1e-4, -1e-4, 1e-30, 88, -88, 88, -99])]
    )
    x = x.view(3, width).to(DTYPES[dtype])
    x = x.abs() + 0.01 if name in ("sqrt", "rsqrt", "reciprocal") else x
    for to in DTYPES:
        program = f"1 3 {dtype} {width} ; {name} {to} 0 ; -> 1 0"
        (found,) = fused([x], program)
        if name in EXACT:
            assert same([found], fused_reference([x], program))
        (expected,) = fused_reference([x], program, torch.float64)
        error = (found.double() - expected).abs() / expected.abs().clamp_min(1e-30)
        near = (found.double() - expected).abs() < 2e-6  # where functions vanish
        assert ((error < (2.0**-8 if to == "bfloat16" else 3e-6)) | near | (found.double() == expected)).all()


def test_numbers_that_are_none(fused: Any) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]])
    for name in set(UNARY) - {"gelu"}:  # torch's own is NaN where x is infinite
        program = f"1 1 float32 4 ; {name} float32 0 ; -> 1 0"
        assert torch.allclose(fused([x], program)[0], fused_reference([x], program)[0], equal_nan=True), name
    program = "1 1 float32 4 ; amax 0 ; sum 0 ; -> 1 0 2 0"
    assert all(result.isnan().all() for result in fused([x], program))


@pytest.mark.parametrize(("dtype", "width"), [("float32", 1), ("float32", 33), ("bfloat16", 17), ("bfloat16", 1030)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction(fused: Any, name: str, dtype: str, width: int) -> None:
    x = torch.randn(4, width).to(DTYPES[dtype])
    program = f"1 4 {dtype} {width} ; {name} 0 ; -> 1 0"
    (found,), (expected,) = fused([x], program), fused_reference([x], program, torch.float64)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)


class Grown:
    """A random program of functions that are exact, and inputs for it: broadcast, strided, or the same for all rows."""

    def __init__(self, seed: int):
        choose = self.choose = random.Random(seed)
        torch.manual_seed(seed)
        self.outer = [choose.choice([1, 2, 3, 7]) for _ in range(choose.choice([0, 1, 2, 2, 3]))]
        self.values: list[tuple[int, str]] = []
        self.inputs: list[Tensor] = []
        head = [len(self.outer), *self.outer]
        for _ in range(choose.randint(1, 4)):
            head += self.input()
        statements = [self.statement() for _ in range(choose.randint(1, 24))]
        made = [
            number
            for number, text in enumerate(statements, len(self.inputs))
            if text.split()[0] not in ("slice", "constant")
        ]
        if not made:
            statements.append("copy bfloat16 0")
            made = [len(self.values)]
        results = []
        for number in choose.sample(made, choose.randint(1, min(3, len(made)))):
            results += [number, *choose.sample(range(len(self.outer)), len(self.outer))]
        text = [" ".join(map(str, head)), *statements, " ".join(map(str, ["->", *results]))]
        self.program = " ; ".join(text)

    def input(self) -> list[Any]:
        choose, dtype = self.choose, self.choose.choice(list(DTYPES))
        width = choose.choice([1, 4, 12, 33])
        dtype = "float32" if width == 1 else dtype
        self.values.append((width, dtype))
        if choose.random() < 0.25:
            shape = choose.choice([(width,), () if width == 1 else (1, width)[len(self.outer) == 0 :]])
            self.inputs.append(torch.randn(shape).to(DTYPES[dtype]))
            return ["same", dtype, width]
        shape = [size if choose.random() < 0.8 else 1 for size in self.outer]
        x = torch.randn(*shape, width).to(DTYPES[dtype])
        if len(shape) > 1 and choose.random() < 0.5:
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        if choose.random() < 0.3:
            x = torch.cat([x, x], -1)[..., width:]  # rows apart from one another
        self.inputs.append(x)
        return [dtype, width]

    def statement(self) -> str:
        choose, count = self.choose, len(self.values)
        name = choose.choice(["constant", "slice", "concatenate", "concatenate", *EXACT, *BINARY, *BINARY])
        one = choose.randrange(count)
        width, dtype = self.values[one]
        if name == "constant":
            self.values.append((1, "float32"))
            return f"constant {choose.uniform(0.5, 2)!r}"
        if name == "slice":
            begin = choose.randrange(width)
            end = choose.randint(begin + 1, width)
            if end - begin == 1 and dtype == "bfloat16":
                begin, end = 0, width
            self.values.append((end - begin, dtype))
            return f"slice {one} {begin} {end}"
        if name == "concatenate":
            alike = [number for number, (_, kept) in enumerate(self.values) if kept == dtype]
            parts = [choose.choice(alike) for _ in range(choose.randint(1, 3))]
            self.values.append((sum(self.values[part][0] for part in parts), dtype))
            return " ".join(map(str, ["concatenate", len(parts), *parts]))
        to = choose.choice(list(DTYPES))
        fits = [number for number, (other, _) in enumerate(self.values) if other in (1, width)]
        other = choose.choice(fits)
        to = "float32" if width == 1 else to
        self.values.append((width, to))
        return f"{name} {to} {one} {other}" if name in BINARY else f"{name} {to} {one}"


@pytest.mark.smoke
@settings(max_examples=300)
@given(st.integers(0, 1 << 30))
def test_a_random_program(seed: int) -> None:
    grown = Grown(seed)
    found = native.load().op("fused")(grown.inputs, grown.program)
    assert same(found, fused_reference(grown.inputs, grown.program)), grown.program
    shapes = [(x.shape, x.stride(), x.dtype) for x in fused_fake(grown.inputs, grown.program)]
    assert shapes == [(x.shape, x.stride(), x.dtype) for x in found]


def test_threads_share_rows(fused: Any) -> None:
    x, w = torch.randn(3, 700, 257).bfloat16(), torch.randn(257)
    program = (
        "2 3 700 bfloat16 257 same float32 257 ; sum_of_squares 0 ; rsqrt float32 2 ; mul bfloat16 0 3 ; "
        "mul bfloat16 4 1 ; -> 5 1 0"
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = fused([x, w], program)
        torch.set_num_threads(4)
        assert same(fused([x, w], program), alone)
    finally:
        torch.set_num_threads(before)
    (row,) = fused([x[1:2, 5:6], w], program.replace("2 3 700", "2 1 1"))
    assert torch.equal(bits(row), bits(alone[0][1:2, 5:6]))


@settings(max_examples=200)
@given(st.integers(0, 1 << 30))
def test_a_damaged_program_is_refused_or_runs(seed: int) -> None:
    grown, choose = Grown(seed), random.Random(seed)
    words = grown.program.split()
    for _ in range(choose.randint(1, 3)):
        words[choose.randrange(len(words))] = choose.choice(
            [*words, "-1", "99999999999999999999", "0", "1", "same", ";"]
        )
    try:
        native.load().op("fused")(grown.inputs, " ".join(words))
    except RuntimeError as error:
        assert "nxd: fused: " in str(error)  # many run
