"""Packed linears, plain and of eight bits: the native kernels against float64, and the packed forms themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer import native
from nxd_infer.ops import packed
from tests.support.needs import needs_native
from tests.support.ops.packed_products import (
    DTYPES,
    KINDS,
    PLAIN,
    Kind,
    check_product,
    check_rows_alone_and_together,
    linear,
    problem,
)

pytestmark = needs_native

SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 5, 7, 12, 13, 16, 17, 25, 31, 33, 64]),  # rows: across every kernel's group of rows
    st.one_of(st.integers(1, 70), st.sampled_from([96, 128])),
    st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 512, 1056])),
)


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.mark.smoke
@settings(max_examples=40)
@given(SHAPES, st.sampled_from(list(KINDS.values())), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1000))
def test_the_product_is_that_of_float64(shape, kind, dtype, bias, seed) -> None:
    check_product(native.load(), kind, *problem(*shape, dtype, bias, seed))


def test_a_row_does_not_depend_on_the_others(library: Any, kind: Kind) -> None:
    check_rows_alone_and_together(library, kind)


@settings(max_examples=25)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 1000))
def test_packing_loses_nothing(shape, dtype, seed) -> None:
    library = native.load()
    _, weight, _ = problem(*shape, dtype, seed=seed)
    plain, fast = packed.pack(weight), packed.pack(weight, library=library)
    assert torch.equal(plain, fast)
    assert plain.shape == weight.shape and plain.dtype == weight.dtype
    assert torch.equal(packed.unpack(plain), weight)
    ids = torch.randint(0, weight.shape[0], (2, 3), generator=torch.Generator().manual_seed(seed))
    for some in (ids, ids.int()):
        assert torch.equal(library.op("packed_embedding")(fast, some, False), F.embedding(some, weight))
    assert torch.equal(packed.packed_embedding(fast, ids), F.embedding(ids, weight))


@settings(max_examples=25)
@given(SHAPES, st.sampled_from(DTYPES), st.integers(0, 1000))
def test_packing_in_eight_bits_rounds_each_row_by_its_own_scale(shape, dtype, seed) -> None:
    library = native.load()
    _, weight, _ = problem(*shape, dtype, seed=seed)
    weight[0] = 0
    plain, fast = packed.pack_int8(weight), packed.pack_int8(weight, library=library)
    assert torch.equal(plain, fast)
    q, scale = packed.unpack_int8(plain)
    assert all(map(torch.equal, (q, scale), packed.quantize(weight)))
    assert scale[0] == 1 and int(q.abs().max()) <= 127
    assert bool(((q * scale[:, None] - weight.float()).abs() <= scale[:, None] * 0.50001).all())
    ids = torch.randint(0, weight.shape[0], (2, 3), generator=torch.Generator().manual_seed(seed))
    rows = (q * scale[:, None]).to(dtype)[ids]
    half = dtype == torch.bfloat16
    for some in (ids, ids.int()):
        assert torch.equal(library.op("packed_embedding")(fast, some, half), rows)
    assert torch.equal(packed.packed_embedding(fast, ids, half), rows)


def test_what_is_not_finite_stays_visible_and_what_is_tiny_is_kept(library: Any) -> None:
    weight = torch.randn(33, 40)
    weight[1, 3], weight[2, 5] = torch.inf, torch.nan
    weight[3] *= 1e-40
    weight[4] *= 1e-44
    plain, fast = packed.pack_int8(weight), packed.pack_int8(weight, library=library)
    x = torch.randn(2, 40)
    for layout in (plain, fast):
        y = linear(library.op("packed_linears"), x, layout)
        assert not bool(torch.isfinite(y[:, 1:3]).any()) and bool(torch.isfinite(y[:, 3:]).all())
    assert torch.equal(packed.unpack_int8(plain)[0][3:], packed.unpack_int8(fast)[0][3:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_one_input_together_have_the_bits_of_each_alone(library: Any, kind: Kind, dtype: torch.dtype) -> None:
    together = library.op("packed_linears")
    shapes = (((64, 32, 32), 96, True), ((70, 70), 33, False), ((1, 130, 16, 48), 64, True), ((5,), 7, False))
    for rows in (1, 5, 40):
        for sizes, k, bias in shapes:
            x = problem(rows, 1, k, dtype)[0]
            layers = [problem(1, n, k, dtype, True, n)[1:] for n in sizes]
            weights = [kind.pack(weight) for weight, _ in layers]
            biases = [found for _, found in layers if found is not None] if bias else []
            found = together(x, [*weights, *biases], bias)
            alone = [linear(together, x, weight, biases[i] if bias else None) for i, weight in enumerate(weights)]
            assert len(found) == len(alone) and all(map(torch.equal, found, alone))
            for some, wanted in zip(packed.packed_linears(x, [*weights, *biases], bias), alone, strict=True):
                torch.testing.assert_close(some, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_without_elements_and_with_many_dimensions(library: Any, kind: Kind, dtype: torch.dtype) -> None:
    weight = torch.randn(20, 8).to(dtype)
    layout = kind.pack(weight)
    multiply = partial(linear, library.op("packed_linears"))
    assert multiply(torch.zeros(0, 8, dtype=dtype), layout).shape == (0, 20)
    x, across = torch.randn(2, 3, 8).to(dtype), torch.randn(8, 5).to(dtype).T  # whose rows are not contiguous
    for some in (x, across):
        expected = linear(packed.packed_linears, some, layout)
        torch.testing.assert_close(multiply(some, layout), expected, rtol=1e-2, atol=1e-2)
    assert multiply(x[0, 0], layout).shape == (20,)
    assert library.op("packed_embedding")(layout, torch.zeros(0, dtype=torch.int64), True).shape == (0, 8)
    bias = torch.randn(20).to(dtype)
    for rows in (1, 3, 40) if kind is PLAIN else ():  # a sum of no products is the bias
        assert torch.equal(multiply(torch.zeros(rows, 0, dtype=dtype), weight[:, :0], bias), bias.expand(rows, 20))


def test_what_does_not_fit_is_refused(library: Any, kind: Kind) -> None:
    layout, zeros = kind.pack(torch.randn(20, 8)), torch.zeros(2, 8)
    together, gather = library.op("packed_linears"), library.op("packed_embedding")
    multiply = partial(linear, together)
    for call, message in (
        (lambda: multiply(torch.zeros(2, 9), layout), r"\[2, 9\].*does not fit the packed weight \[20, "),
        (lambda: multiply(zeros.double(), layout), "float32 or bfloat16"),
        (lambda: multiply(torch.tensor(1.0), layout), r"of shape \[.., K\], got \[\]"),
        (lambda: multiply(zeros, layout, torch.zeros(19)), "bias"),
        (lambda: multiply(zeros, layout, torch.zeros(20).bfloat16()), "bias"),
        (lambda: together(zeros, [layout, layout, torch.zeros(20)], True), "3 tensors are no weights with a bias each"),
        (lambda: together(zeros, [], False), "0 tensors are no weights"),
        (lambda: together(zeros, [layout, layout.double()], False), "does not fit the packed weight"),
        (lambda: gather(layout, torch.tensor([0, 20]), False), "index 20 is out of range for a table of 20 rows"),
        (lambda: gather(layout, torch.tensor([0, -1]), False), "index -1 is out of range for a table of 20 rows"),
        (lambda: gather(layout, torch.tensor([0.0]), False), "int64 or int32"),
        (lambda: gather(layout.double(), torch.tensor([0]), False), r"matrix \[N, K\] of float32 or bfloat16"),
        (lambda: library.op(kind.pack.__name__)(layout, torch.zeros(20, 9)), "into one of"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    if kind is PLAIN:
        with pytest.raises(RuntimeError, match="does not fit the packed weight"):
            multiply(zeros.bfloat16(), layout)
