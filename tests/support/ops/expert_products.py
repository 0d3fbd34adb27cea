"""What the native operator for experts must hold at every level of instructions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_infer.ops import packed_experts
from tests.support.ops.packed_products import DTYPES, KINDS, Kind, linear

ROUTES = ("spread", "all of one", "few", "nobody")


def route(how: str, rows: int, count: int, generator: torch.Generator) -> Tensor:
    """The experts of rows: of all, also those that do not exist; of one; of two, so that others have none; of none."""
    if how == "all of one":
        return torch.full((rows,), count - 1)
    if how == "nobody":
        return torch.full((rows,), -1)
    if how == "few":
        return torch.randint(0, 2, (rows,), generator=generator) * (count - 1)
    return torch.randint(-1, count + 1, (rows,), generator=generator)


def problem(rows: int, count: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(count, n, k, generator=generator) * torch.rand(count, n, 1, generator=generator)
    return torch.randn(rows, k, generator=generator).to(dtype), weight.to(dtype)


def check_product(
    library: Any, kind: Kind, how: str, rows: int, count: int, n: int, k: int, dtype: torch.dtype
) -> None:
    """Each row is bit-equal to a linear layer of its expert's matrix, which is compared with float64 itself; the plain
    reference is close."""
    x, weight = problem(rows, count, n, k, dtype, rows)
    experts = route(how, rows, count, torch.Generator().manual_seed(rows))
    layout = kind.pack(weight, library=library)
    assert torch.equal(layout.flatten(), torch.cat([kind.pack(one).flatten() for one in weight]))
    found = library.op("packed_experts")(x, layout, experts)
    inside = (experts >= 0) & (experts < count)
    chosen = experts.clamp(0, count - 1)
    exact = torch.einsum("nok,nk->no", _exact(kind, weight)[chosen], x.double()) * inside[:, None]
    size = torch.einsum("nok,nk->no", _exact(kind, weight)[chosen].abs(), x.double().abs())
    room = size * (k + 2) * 2.0**-23 + (exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0)
    for some in (found, packed_experts(x, layout, experts)):
        assert some.dtype == dtype and bool(((some.double() - exact).abs() <= room * 1.01 + 1e-30).all()), (how, rows)
    for row in range(rows):
        alone = linear(library.op("packed_linears"), x[row : row + 1], layout[chosen[row]])[0]
        assert torch.equal(found[row], alone if inside[row] else torch.zeros_like(alone)), (kind.name, how, rows, n, k)


def _exact(kind: Kind, weight: Tensor) -> Tensor:
    return torch.stack([kind.exact(one) for one in weight])


def check_every_shape(library: Any) -> None:
    for kind in KINDS.values():
        for dtype in DTYPES:
            for place, rows in enumerate((1, 2, 3, 7, 16, 33, 64)):
                for n, k in ((1, 1), (33, 31), (64, 96), (70, 513)):
                    check_product(library, kind, ROUTES[place % len(ROUTES)], rows, 5, n, k, dtype)
            check_product(library, kind, "all of one", 64, 3, 40, 1056, dtype)
            check_product(library, kind, "spread", 700, 2, 8, 4096, dtype)  # several groups of one expert


def check_rows_alone_and_together(library: Any) -> None:
    """The bits of a row are those of it alone and in other company, with any number of threads."""
    before, multiply = torch.get_num_threads(), library.op("packed_experts")
    try:
        for kind in KINDS.values():
            for dtype in DTYPES:
                x, weight = problem(65, 6, 72, 264, dtype)
                layout, experts = kind.pack(weight), torch.arange(65) * 7 % 6
                torch.set_num_threads(2)
                whole = multiply(x, layout, experts)
                for threads in (5, 1):
                    torch.set_num_threads(threads)
                    assert torch.equal(multiply(x, layout, experts), whole)
                for part in (slice(0, 1), slice(3, 16), slice(20, 52)):
                    assert torch.equal(multiply(x[part], layout, experts[part]), whole[part])
                broken = torch.full_like(x, torch.nan)
                broken[7] = x[7]
                assert torch.equal(multiply(broken, layout, experts)[7], whole[7])
    finally:
        torch.set_num_threads(before)
