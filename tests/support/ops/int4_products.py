"""What the kernels for weights of four bits must hold at every level: the bits of the plain reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from nxd_infer.ops import int4, packed
from tests.support.ops.packed_products import DTYPES, linear, problem

FORMS = tuple((group, zeros) for group in (32, 64, 128) for zeros in (False, True))


def check_product(library: Any, form: tuple[int, bool], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The operator has the reference's bits, and is as near to float64 as rounding x allows."""
    layout = int4.pack(weight, *form, library=library)
    assert torch.equal(layout, int4.pack(weight, *form)), (form, weight.shape)
    found = linear(library.op("packed_linears"), x, layout, bias)
    assert found.dtype == x.dtype
    assert torch.equal(found, linear(packed.packed_linears, x, layout, bias)), (form, x.dtype, x.shape, weight.shape)
    K, zero = weight.shape[1], 0.0 if bias is None else bias.double()
    exact = int4.dequantize(*int4.unpack(layout)).double()[:, :K]
    expected = x.double() @ exact.T + zero
    steps = torch.zeros(x.shape[0], K, dtype=torch.float64)  # half of one of x, in each cell the largest value / 127
    for start in range(0, K, 32):
        part = x[:, start : start + 32].double()
        steps[:, start : start + 32] = part.abs().amax(1, keepdim=True) / 254
    room = steps @ exact.abs().T * (1 + 1e-5) + (x.double().abs() @ exact.abs().T + abs(zero)) * (K + 4) * 2.0**-22
    if x.dtype == torch.bfloat16:
        room = room + (expected.abs() + room) * 2.0**-8
    assert bool(((found.double() - expected).abs() <= room + 1e-30).all()), (form, x.dtype, x.shape, weight.shape)
    return found


def check_every_shape(library: Any) -> None:
    for number, form in enumerate(FORMS):
        for n, k in ((1, 1), (32, 32), (33, 31), (40, 129), (70, 300), (9, 1056)):
            for rows in (1, 3, 33):
                check_product(library, form, *problem(rows, n, k, DTYPES[(number + rows) % 2], n % 2 == 0, k))


def check_rows_alone_and_together(library: Any) -> None:
    """A row's result has the same bits alone, in a batch, beside broken rows, and with any number of threads."""
    before = torch.get_num_threads()
    multiply = partial(linear, library.op("packed_linears"))
    try:
        for form in FORMS:
            x, weight, bias = problem(67, 232, 288, torch.bfloat16, True, 3)
            layout = int4.pack(weight, *form, library=library)
            torch.set_num_threads(2)
            whole = multiply(x, layout, bias)
            for threads in (9, 1):  # more than there are blocks to share, and nobody to share with
                torch.set_num_threads(threads)
                assert torch.equal(multiply(x, layout, bias), whole)
            for first, last in ((0, 1), (0, 4), (31, 33), (20, 64), (66, 67)):
                assert torch.equal(multiply(x[first:last], layout, bias), whole[first:last]), (form, first, last)
            others = torch.full_like(x, torch.inf)
            others[7] = x[7]
            found = multiply(others, layout, bias)
            assert torch.equal(found[7], whole[7]) and not bool(found[8].isfinite().any())
    finally:
        torch.set_num_threads(before)
