"""Weights of four bits: the native operators against the plain reference, and that against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer import native
from nxd_infer.ops import int4, packed
from tests.support.needs import needs_native
from tests.support.ops import int4_products
from tests.support.ops.int4_products import FORMS
from tests.support.ops.packed_products import DTYPES, linear, problem

pytestmark = needs_native

SHAPES = st.tuples(
    st.sampled_from([1, 2, 3, 5, 16, 31, 33, 64, 65]),
    st.one_of(st.integers(1, 70), st.sampled_from([96, 128])),
    st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 320, 577])),
)


@pytest.fixture(scope="module")
def library() -> Any:
    return native.load()


@pytest.mark.smoke
@settings(max_examples=40, deadline=None)
@given(SHAPES, st.sampled_from(FORMS), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 1000))
def test_the_product_has_the_references_bits_and_the_error_of_rounding_rows(shape, form, dtype, bias, seed) -> None:
    int4_products.check_product(native.load(), form, *problem(*shape, dtype, bias, seed))


def test_a_row_does_not_depend_on_the_others(library: Any) -> None:
    int4_products.check_rows_alone_and_together(library)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.sampled_from(FORMS), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_packing_is_rounding_each_group_and_loses_nothing_else(shape, form, dtype, seed) -> None:
    _, weight, _ = problem(*shape, dtype, seed=seed)
    weight[0] = 0
    layout = int4.pack(weight, *form, library=native.load())
    size, zeros = int4.form_of(layout)
    assert zeros == form[1] and size <= form[0]
    found = int4.unpack(layout)
    assert all(map(torch.equal, found, int4.quantize(weight, size, zeros)))
    assert not bool(int4.dequantize(*found)[0].any())


@pytest.mark.parametrize("form", FORMS)
def test_a_group_has_less_error_than_with_steps_of_its_range(library: Any, form: tuple[int, bool]) -> None:
    size, zeros = form
    weight = problem(1, 128, 512, torch.float32)[1]
    exact = int4.dequantize(*int4.unpack(int4.pack(weight, *form, library=library)))
    w = weight.unflatten(1, (-1, size))
    low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    if zeros:
        step = (high - low) / 15
        zero = (-low / step).round()
    else:  # the value of largest magnitude is 8 steps from 0
        step, zero = torch.where(high < -low, low, high) / -8, 8.0
    plain = ((w / step + zero).round().clamp(0, 15) - zero) * step
    error, naive = (float(((some.view_as(w) - w) ** 2).sum() / (w**2).sum()) for some in (exact, plain))
    assert error < (0.87 if zeros else 0.93) * naive, (error, naive)


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_one_input_together_have_the_bits_of_each_alone(library: Any, form: tuple[int, bool]) -> None:
    together = library.op("packed_linears")
    for rows, bias in ((1, False), (5, True), (40, False)):
        x = problem(rows, 1, 160, torch.bfloat16)[0]
        layers = [problem(1, n, 160, torch.bfloat16, True, n)[1:] for n in (64, 9, 130)]
        weights = [int4.pack(weight, *form, library=library) for weight, _ in layers]
        biases = [found for _, found in layers if found is not None] if bias else []
        alone = [linear(together, x, weight, biases[i] if bias else None) for i, weight in enumerate(weights)]
        assert all(map(torch.equal, together(x, [*weights, *biases], bias), alone))


def test_a_group_takes_fewer_values_where_that_takes_fewer_bytes() -> None:
    assert int4.packed_shape([5, 256], 128, False) == [5, 2, 66]
    assert int4.packed_shape([5, 576], 128, True) == [5, 6, 51]  # six of 96, not five of 128
    assert int4.packed_shape([5, 8], 128, False) == [5, 1, 18]


def test_what_is_not_finite_stays_visible(library: Any) -> None:
    weight, x = torch.randn(33, 70), torch.randn(2, 70)
    weight[1, 3], weight[2, 69] = torch.inf, torch.nan
    for form in FORMS:
        plain, fast = int4.pack(weight, *form), int4.pack(weight, *form, library=library)
        for y in (linear(library.op("packed_linears"), x, fast), linear(packed.packed_linears, x, plain)):
            assert not bool(y[:, 1:3].isfinite().any()) and bool(y[:, 3:].isfinite().all())


def test_what_does_not_fit_is_refused(library: Any) -> None:
    layout, op = int4.pack(torch.randn(20, 40), 32, False), library.op("packed_linears")
    for call, message in (
        (lambda: op(torch.zeros(2, 65), [layout], False), r"\[2, 65\].*does not fit the packed weight \[20, 2, 18\]"),
        (lambda: op(torch.zeros(2, 40), [layout, packed.pack(torch.zeros(3, 40))], False), "does not fit the packed"),
        (lambda: op(torch.zeros(2, 40), [layout[:, :, :9].contiguous()], False), "does not fit the packed weight"),
        (lambda: library.op("pack_int4")(layout, torch.zeros(20, 65)), r"\[20, 65\].*into one of shape \[20, 2, 18\]"),
        (lambda: library.op("pack_int4")(layout, torch.zeros(20, 40).double()), "pack_int4: a weight of shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
