"""Calls of ``cache_attention`` against its reference in float64.

Bounds: float32 within 1e-5 of the larger of the value and 0.1; bfloat16 within 2^-7 of the larger of the value and 1
(one rounding of the weights and one of the result, each 2^-8 relative at most).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nxd_infer.ops import cache_attention

NAN = float("nan")
BOUNDS = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2.0**-7, 2.0**-7),
}
f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
i8 = torch.int8


def eight_bits(x: Tensor) -> Tensor:
    """Entries of an int8 cache: with a scale that is NaN where ``x`` is."""
    scale = (x.float().abs().amax(-1) / 127).clamp_min(1e-30)
    q = (x.float() / scale[..., None]).nan_to_num().round().to(i8)
    return torch.cat([q, scale[..., None].view(i8)], -1)


@dataclass(frozen=True)
class Step:
    """The operands of a call; ``start`` and ``length`` say which entries of the caches live, all others are NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    start: Tensor
    length: Tensor
    scale: float

    def run(self, operator: Any) -> Tensor:
        """The result; the caches change."""
        return operator(
            self.q,
            self.k,
            self.v,
            self.k_cache,
            self.v_cache,
            self.table,
            self.start,
            self.length,
            self.scale,
        )

    def live(self) -> Tensor:
        """Which results mean something: bool [B, S]."""
        step = torch.arange(self.q.shape[1])
        room = self.table.shape[1] * self.k_cache.shape[2]
        return (step < self.length[:, None]) & (self.start[:, None] + step < room)

    def copy(self) -> Step:
        return replace(self, k_cache=self.k_cache.clone(), v_cache=self.v_cache.clone())

    def row(self, b: int) -> Step:
        """The same call for one row alone, over the same blocks."""
        one = slice(b, b + 1)
        cut = {name: getattr(self, name)[one] for name in ("q", "k", "v", "table", "start", "length")}
        return replace(self.copy(), **cut)

    def wide(self) -> Step:
        """In float64, with the new entries rounded as the cache rounds them."""
        cache = self.k_cache.dtype
        if cache == i8:
            return replace(self.copy(), q=self.q.double(), k=self.k.double(), v=self.v.double())
        return Step(
            self.q.double(),
            self.k.to(cache).double(),
            self.v.to(cache).double(),
            self.k_cache.double(),
            self.v_cache.double(),
            self.table,
            self.start,
            self.length,
            self.scale,
        )


def step(
    seed: int,
    rows: int,
    queries: int,
    kv_heads: int,
    group: int,
    dim: int,
    block: int,
    blocks: int,
    dtype: torch.dtype = torch.float32,
    cache: torch.dtype | None = None,
    full: bool = False,
) -> Step:
    """A call whose q, k and v are views of one fused projection. ``full``: every query is live, at a late start."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * group
    fused = torch.randn(rows, queries, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
    q, k, v = fused.split([heads, kv_heads, kv_heads], 2)
    room = block * blocks
    if full:
        start = torch.randint(max(0, room // 2 - queries), max(1, room - queries + 1), (rows,), generator=generator)
        length = torch.full((rows,), queries)
    else:
        start = torch.randint(0, room + 1, (rows,), generator=generator)
        length = torch.randint(0, queries + 1, (rows,), generator=generator)
    table = torch.randperm(rows * blocks, generator=generator).view(rows, blocks)
    caches = []
    for _ in range(2):
        history = torch.randn(rows, blocks, block, kv_heads, dim, generator=generator)
        history = history if cache == i8 else history.to(cache or dtype)
        stale = torch.arange(room).view(1, blocks, block) >= start[:, None, None]
        history[stale] = NAN
        whole = torch.full((rows * blocks + 1, kv_heads, block, dim), NAN, dtype=history.dtype)
        whole[table] = history.transpose(2, 3)
        caches.append(eight_bits(whole) if cache == i8 else whole)
    return Step(q, k, v, caches[0], caches[1], table, start, length, dim**-0.5)


def check(operator: Any, call: Step) -> Tensor:
    """Compare result and caches with the reference in float64."""
    exact, found = call.wide(), call.copy()
    expected, result = exact.run(cache_attention), found.run(operator)
    assert result.dtype == call.q.dtype and result.shape == call.q.shape and result.is_contiguous()
    assert result.isfinite().all(), "padding is finite, and nothing stale is read"
    rtol, atol = BOUNDS[call.q.dtype]
    live = call.live()
    torch.testing.assert_close(result[live].double(), expected[live], rtol=rtol, atol=atol)
    for mine, reference in ((found.k_cache, exact.k_cache), (found.v_cache, exact.v_cache)):
        torch.testing.assert_close(mine[:-1].double(), reference[:-1].double(), rtol=0, atol=0, equal_nan=True)
    return result


# Decode and few queries, many queries; whole vectors and odd sizes; one chunk of the context and several.
EVERY_KERNEL = [
    (rows, queries, 2, group, dim, 140, 3)
    for rows, queries in ((2, 1), (1, 3), (1, 45))
    for group in (1, 3)
    for dim in (20, 64, 112)
]


def check_weights_add_up_to_one(operator: Any, queries: int) -> None:
    """The weights that values are multiplied with are those that are summed: all but one are 0.5018, which bfloat16
    rounds to 0.5, and all values are one."""
    call = step(0, 1, queries, 2, 3, 64, 128, 1, bf16, full=True)
    first = torch.eye(64, dtype=bf16)[0]
    keys, values = (torch.where(cache.isnan(), cache, fill) for cache, fill in ((call.k_cache, 0), (call.v_cache, 1)))
    keys[call.table[0, 0], :, 0] = first
    result = replace(
        call,
        q=first.expand_as(call.q).contiguous(),
        k=torch.zeros_like(call.k),
        v=torch.ones_like(call.v),
        k_cache=keys,
        v_cache=values,
        scale=-math.log(0.5018),
    ).run(operator)
    assert torch.equal(result, torch.ones_like(result)), result.unique()


def check_every_kernel(library: Any) -> None:
    torch.set_num_threads(1)
    operator = library.op("cache_attention")
    for dtype in (f32, bf16):
        for seed, shape in enumerate(EVERY_KERNEL):
            check(operator, step(seed, *shape, dtype, full=True))
        for seed, shape in enumerate(EVERY_KERNEL[:: 1 if dtype == bf16 else 4]):
            check(operator, step(seed, *shape, dtype, i8, full=True))
    check(operator, step(1, 1, 3, 1, 2, 64, 140, 2, f32, bf16, full=True))
    for queries in (1, 45):
        check_weights_add_up_to_one(operator, queries)
    check_few_queries_have_the_bits_of_one_each(operator)


def check_few_queries_have_the_bits_of_one_each(operator: Any) -> None:
    shapes = [*itertools.product((2, 5, 16), (1, 2, 3, 8, 12)), (6, 12), (11, 12)]  # the last leave few rows in a tile
    dtypes = ((f32, f32), (bf16, bf16), (bf16, i8))
    for (dtype, cache), (queries, group), dim in itertools.product(dtypes, shapes, (8, 64)):
        whole = step(queries, 2, queries, 2, group, dim, 300, 1, dtype, cache, full=True)
        together, alone = whole.copy().run(operator), whole.copy()
        for place in range(queries):
            one = {name: getattr(alone, name)[:, place : place + 1] for name in ("q", "k", "v")}
            call = replace(alone, **one, start=alone.start + place, length=torch.ones_like(alone.length))
            assert torch.equal(call.run(operator)[:, 0], together[:, place]), (dtype, queries, group, dim, place)


class Attend(torch.nn.Module):
    """Two layers' worth of updates."""

    k0: Tensor
    v0: Tensor
    k1: Tensor
    v1: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("k0", "v0", "k1", "v1"):
            self.register_buffer(name, torch.zeros(3, 2, 77, 16))

    def forward(self, x: Tensor, table: Tensor, start: Tensor, length: Tensor) -> Tensor:
        for k_cache, v_cache in ((self.k0, self.v0), (self.k1, self.v1)):
            q, k, v = x.split([4, 2, 2], 2)
            attended = cache_attention(q, k, v, k_cache, v_cache, table, start, length, 0.25)
            x = torch.cat((attended, x[:, :, 4:]), 2) * 1.5
        return x


def attend() -> tuple[torch.nn.Module, dict[Any, int]]:
    return Attend(), {}
