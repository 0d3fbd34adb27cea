"""Packed linears over weights of eight bits: the native kernels of every level against float64, and the packed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxd_infer import native
from nxd_infer.ops import packed, packed_int8
from tests.support.needs import needs_native
from tests.support.ops.levels import LEVELS, run_at

pytestmark = needs_native

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 6, 7, 12, 14, 15, 24, 25, 29, 64]),  # rows: few and many for every kernel
    st.one_of(st.integers(1, 70), st.sampled_from([96, 128])),
    st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 512, 1056])),
)


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


def problem(
    rows: int, n: int, k: int, dtype: torch.dtype, bias: bool, seed: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    found = torch.randn(n, generator=generator).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), found


def check_product(library: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compare with float64 over the same whole numbers: the error of adding in float32, and one rounding."""
    q, scale = packed_int8.quantize(weight)
    wide = 0.0 if bias is None else bias.double()
    expected = F.linear(x.double(), q.double()) * scale.double() + wide
    size = F.linear(x.double().abs(), q.double().abs()) * scale.double() + abs(wide)
    layout = packed_int8.pack_int8(weight, library=library)
    found = library.op("packed_int8_linear")(x, layout, bias)
    assert found.dtype == x.dtype and found.shape == expected.shape
    room = size * (weight.shape[1] + 2) * 2.0**-23
    if x.dtype == torch.bfloat16:
        room = room + expected.abs() * 2.0**-8
    for some in (found, packed_int8.packed_int8_linear(x, layout, bias)):
        assert bool(((some.double() - expected).abs() <= room + 1e-30).all())
    return found


@settings(max_examples=60)
@given(SHAPES, st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1000))
def test_the_product_is_that_of_float64(shape: tuple[int, int, int], dtype: torch.dtype, bias: bool, seed: int) -> None:
    check_product(native.load(), *problem(*shape, dtype, bias, seed))


@settings(max_examples=60)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 1000))
def test_the_packed_form(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    library = native.load()
    _, weight, _ = problem(*shape, dtype, False, seed)
    weight[0] = 0
    plain, fast = packed_int8.pack_int8(weight), packed_int8.pack_int8(weight, library=library)
    assert torch.equal(plain, fast)
    q, scale = packed_int8.unpack_int8(plain)
    assert all(map(torch.equal, (q, scale), packed_int8.quantize(weight)))
    assert scale[0] == 1 and int(q.abs().max()) <= 127
    assert bool(((q * scale[:, None] - weight.float()).abs() <= scale[:, None] * 0.50001).all())
    ids = torch.randint(0, weight.shape[0], (2, 3), generator=torch.Generator().manual_seed(seed))
    rows = (q * scale[:, None]).to(dtype)[ids]
    half = dtype == torch.bfloat16
    for some in (ids, ids.int()):
        assert torch.equal(library.op("packed_int8_embedding")(fast, some, half), rows)
    assert torch.equal(packed_int8.packed_int8_embedding(fast, ids, half), rows)


def test_what_is_not_finite_stays_visible_and_what_is_tiny_is_kept(library: Any) -> None:
    weight = torch.randn(33, 40)
    weight[1, 3], weight[2, 5] = torch.inf, torch.nan
    weight[3] *= 1e-40
    weight[4] *= 1e-44
    plain, fast = packed_int8.pack_int8(weight), packed_int8.pack_int8(weight, library=library)
    x = torch.randn(2, 40)
    for layout in (plain, fast):
        y = library.op("packed_int8_linear")(x, layout, None)
        assert not bool(torch.isfinite(y[:, 1:3]).any()) and bool(torch.isfinite(y[:, 3:]).all())
    assert torch.equal(packed_int8.unpack_int8(plain)[0][3:], packed_int8.unpack_int8(fast)[0][3:])


def rows_alone_and_together(library: Any) -> None:
    """A row's result has the same bits alone, in any batch, beside other rows, and with any number of threads."""
    before = torch.get_num_threads()
    multiply = library.op("packed_int8_linear")
    try:
        for dtype in DTYPES:
            for n, k in ((512, 256), (70, 1056), (48, 33)):
                x, weight, bias = problem(65, n, k, dtype, True, 3)
                layout = packed_int8.pack_int8(weight)
                torch.set_num_threads(2)
                whole = multiply(x, layout, bias)
                torch.set_num_threads(1)
                assert torch.equal(multiply(x, layout, bias), whole)
                for first, last in ((0, 1), (0, 4), (3, 16), (20, 52), (64, 65)):
                    part = multiply(x[first:last], layout, bias)
                    assert torch.equal(part, whole[first:last]), (dtype, n, k, first, last)
                if dtype == torch.float32:  # the bits of a plain weight of these whole numbers
                    q, scale = packed_int8.quantize(weight)
                    sums = library.op("packed_linear")(x, packed.pack(q.float()), None)
                    assert torch.equal(multiply(x, layout, None), sums * scale)
    finally:
        torch.set_num_threads(before)


def every_shape(library: Any) -> None:
    for rows in (1, 2, 3, 4, 6, 7, 12, 14, 15, 24, 25, 29, 50):
        for n, k in ((1, 1), (16, 32), (33, 31), (40, 70), (64, 512), (31, 1056)):
            for dtype in DTYPES:
                check_product(library, *problem(rows, n, k, dtype, rows % 2 == 0, rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_layers_of_one_input_together_have_the_bits_of_each_alone(library: Any, dtype: torch.dtype, rows: int) -> None:
    for sizes, k, bias in (((64, 32, 32), 96, True), ((70, 70), 33, False), ((1, 130, 16), 64, True), ((5,), 7, False)):
        x = problem(rows, 1, k, dtype, False, 0)[0]
        layers = [problem(1, n, k, dtype, True, n)[1:] for n in sizes]
        weights = [packed_int8.pack_int8(weight) for weight, _ in layers]
        biases = [found for _, found in layers if found is not None] if bias else []
        together = library.op("packed_int8_linears")(x, [*weights, *biases], bias)
        one = library.op("packed_int8_linear")
        alone = [one(x, weight, biases[i] if bias else None) for i, weight in enumerate(weights)]
        assert len(together) == len(alone) and all(map(torch.equal, together, alone))
        for found, wanted in zip(packed_int8.packed_int8_linears(x, weights, biases), alone, strict=True):
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_agrees_with_float64(library: Any, level: str) -> None:
    code = (
        "from tests.integration.ops.test_packed_int8 import every_shape, rows_alone_and_together\n"
        "every_shape(native.load()); rows_alone_and_together(native.load()); print('fine')\n"
    )
    assert run_at(library, level, code) == "fine"


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_without_elements_and_with_many_dimensions(library: Any, dtype: torch.dtype) -> None:
    weight = torch.randn(20, 8).to(dtype)
    layout = packed_int8.pack_int8(weight)
    multiply = library.op("packed_int8_linear")
    assert multiply(torch.zeros(0, 8, dtype=dtype), layout, None).shape == (0, 20)
    x = torch.randn(2, 3, 8).to(dtype)
    reference = packed_int8.packed_int8_linear(x, layout)
    torch.testing.assert_close(multiply(x, layout, None), reference, rtol=1e-2, atol=1e-2)
    assert multiply(x[0, 0], layout, None).shape == (20,)
    assert library.op("packed_int8_embedding")(layout, torch.zeros(0, dtype=torch.int64), True).shape == (0, 8)


def test_what_does_not_fit_is_refused(library: Any) -> None:
    layout = packed_int8.pack_int8(torch.randn(20, 8))
    multiply, gather = library.op("packed_int8_linear"), library.op("packed_int8_embedding")
    with pytest.raises(RuntimeError, match=r"\[2, 9\].*does not fit the weight \[20, 8\]"):
        multiply(torch.zeros(2, 9), layout, None)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        multiply(torch.zeros(2, 8).double(), layout, None)
    with pytest.raises(RuntimeError, match=r"int8 matrix \[N, K \+ 4\], got \[20, 8\]"):
        multiply(torch.zeros(2, 8), torch.zeros(20, 8), None)
    for bias in (torch.zeros(19), torch.zeros(20).bfloat16()):
        with pytest.raises(RuntimeError, match="bias"):
            multiply(torch.zeros(2, 8), layout, bias)
    with pytest.raises(RuntimeError, match="into one of"):
        library.op("pack_int8")(layout, torch.zeros(20, 9))
    with pytest.raises(RuntimeError, match="index 20 is out of range for a table of 20 rows"):
        gather(layout, torch.tensor([0, 20]), False)
