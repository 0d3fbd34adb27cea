"""What the kernels for packed linears must hold at every level: plain weights, and weights of eight bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.ops import packed

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Kind:
    """A packed form."""

    name: str
    pack: Callable[..., Tensor]
    exact: Callable[[Tensor], Tensor]
    """The weight that is computed with, in float64."""


def _rounded(weight: Tensor) -> Tensor:
    q, scale = packed.quantize(weight)
    return q.double() * scale.double()[:, None]


PLAIN = Kind("packed", packed.pack, Tensor.double)
INT8 = Kind("packed_int8", packed.pack_int8, _rounded)
KINDS = {kind.name: kind for kind in (PLAIN, INT8)}


def linear(operator: Callable[..., list[Tensor]], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One layer, by an operator for several."""
    (result,) = operator(x, [weight] if bias is None else [weight, bias], bias is not None)
    return result


def problem(
    rows: int, n: int, k: int, dtype: torch.dtype, bias: bool = False, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    weight = torch.randn(n, k, generator=generator) * torch.rand(n, 1, generator=generator)
    found = torch.randn(n, generator=generator).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), found


def check_product(library: Any, kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Compare with float64: the error of adding k products in float32, and for bfloat16 one rounding of the result."""
    exact, wide = kind.exact(weight), 0.0 if bias is None else bias.double()
    expected = F.linear(x.double(), exact) + wide
    size = F.linear(x.double().abs(), exact.abs()) + abs(wide)
    layout = kind.pack(weight, library=library)
    found = linear(library.op("packed_linears"), x, layout, bias)
    assert found.dtype == x.dtype and found.shape == expected.shape
    room = size * (weight.shape[1] + 2) * 2.0**-23
    if x.dtype == torch.bfloat16:
        room = room + expected.abs() * 2.0**-8
    for some in (found, linear(packed.packed_linears, x, layout, bias)):
        assert bool(((some.double() - expected).abs() <= room + 1e-30).all()), (kind.name, x.dtype, *weight.shape)


def check_every_shape(library: Any, kind: Kind) -> None:
    for rows in (1, 2, 3, 4, 6, 7, 12, 13, 15, 16, 17, 24, 25, 29, 33, 50):
        for n, k in ((1, 1), (16, 32), (33, 31), (40, 70), (64, 512), (31, 1056)):  # 1056: two spans of tiles
            for dtype in DTYPES:
                check_product(library, kind, *problem(rows, n, k, dtype, rows % 2 == 0, rows))


def check_rows_alone_and_together(library: Any, kind: Kind) -> None:
    """A row's result has the same bits alone, in a batch, beside broken rows, and with any number of threads."""
    before = torch.get_num_threads()
    multiply = partial(linear, library.op("packed_linears"))
    try:
        for dtype in DTYPES:
            for n, k in ((512, 256), (70, 1056), (48, 33)):
                x, weight, bias = problem(65, n, k, dtype, True, 3)
                layout = kind.pack(weight)
                torch.set_num_threads(2)
                whole = multiply(x, layout, bias)
                for threads in (5, 1):  # more than there are blocks to share, and nobody to share with
                    torch.set_num_threads(threads)
                    assert torch.equal(multiply(x, layout, bias), whole)
                for first, last in ((0, 1), (0, 4), (3, 16), (20, 52), (64, 65)):
                    part = multiply(x[first:last], layout, bias)
                    assert torch.equal(part, whole[first:last]), (kind.name, dtype, n, k, first, last)
                others = torch.full_like(x, torch.inf)
                others[7] = x[7]
                assert torch.equal(multiply(others, layout, bias)[7], whole[7])
                if kind is INT8 and dtype == torch.float32:  # the bits of a plain weight of these whole numbers
                    q, scale = packed.quantize(weight)
                    assert torch.equal(multiply(x, layout), multiply(x, packed.pack(q.float())) * scale)
    finally:
        torch.set_num_threads(before)


def check_threads_that_wait(library: Any) -> None:
    """The permission to use tiles is asked for once, and holds for threads that ran before the first product."""
    go, results = threading.Event(), []
    x, weight = torch.ones(17, 64).bfloat16(), packed.pack(torch.ones(32, 64).bfloat16())

    def work() -> None:
        go.wait()
        results.append(linear(library.op("packed_linears"), x, weight))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    linear(library.op("packed_linears"), x, weight)
    go.set()
    for thread in threads:
        thread.join()
    assert len(results) == 3 and all(bool((y == 64).all()) for y in results)
