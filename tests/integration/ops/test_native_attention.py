"""The native ``cache_attention`` against its reference in float64, at every instruction set.

Bounds: float32 within 1e-5 of the larger of the value and 0.1; bfloat16 within 2^-7 of the larger of the value and 1
(one rounding of the weights and one of the result, each 2^-8 relative at most).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nxd_infer import native
from nxd_infer.errors import RankFailedError
from nxd_infer.ops import cache_attention, cache_attention_reference
from nxd_infer.trace import parallel_model_trace
from tests.support.needs import needs_native
from tests.support.ops.levels import LEVELS, run_at

pytestmark = needs_native

NAN = float("nan")
BOUNDS = {
    torch.float64: (1e-12, 1e-12),
    torch.float32: (1e-5, 1e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (2.0**-7, 2.0**-7),
}


@pytest.fixture(scope="module")
def operator() -> Any:
    return native.load().op("cache_attention")


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
        history = torch.randn(rows, blocks, block, kv_heads, dim, generator=generator).to(cache or dtype)
        stale = torch.arange(room).view(1, blocks, block) >= start[:, None, None]
        history[stale] = NAN
        whole = torch.full((rows * blocks + 1, kv_heads, block, dim), NAN, dtype=cache or dtype)
        whole[table] = history.transpose(2, 3)
        caches.append(whole)
    return Step(q, k, v, caches[0], caches[1], table, start, length, dim**-0.5)


def check(operator: Any, call: Step) -> Tensor:
    """Compare result and caches with the reference in float64."""
    exact, found = call.wide(), call.copy()
    expected, result = exact.run(cache_attention_reference), found.run(operator)
    assert result.dtype == call.q.dtype and result.shape == call.q.shape and result.is_contiguous()
    assert result.isfinite().all(), "padding is finite, and nothing stale is read"
    rtol, atol = BOUNDS[call.q.dtype]
    live = call.live()
    torch.testing.assert_close(result[live].double(), expected[live], rtol=rtol, atol=atol)
    for mine, reference in ((found.k_cache, exact.k_cache), (found.v_cache, exact.v_cache)):
        torch.testing.assert_close(mine[:-1].double(), reference[:-1], rtol=0, atol=0, equal_nan=True)
    return result


SHAPES = {
    "rows": st.integers(1, 3),
    "queries": st.sampled_from([1, 1, 2, 3, 5, 17, 40]),
    "kv_heads": st.integers(1, 3),
    "group": st.sampled_from([1, 2, 3, 4, 7]),
    "dim": st.sampled_from([1, 3, 16, 31, 64, 80, 128]),
    "block": st.sampled_from([1, 5, 16, 100, 150]),
    "blocks": st.integers(1, 3),
}


@settings(max_examples=60)
@given(
    **SHAPES,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    full=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_the_reference_in_float64(
    operator, seed, rows, queries, kv_heads, group, dim, block, blocks, dtype, full
):
    check(operator, step(seed, rows, queries, kv_heads, group, dim, block, blocks, dtype, full=full))


f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(f64, f64), (f16, f16), (f32, bf16), (f32, f16), (f64, f32), (f64, bf16), (f16, f32)],
)
@pytest.mark.parametrize("queries", [1, 30])
def test_other_dtypes_and_caches_of_another_dtype(operator, dtype, cache, queries):
    check(operator, step(1, 2, queries, 2, 2, 16, 100, 2, dtype, cache, full=True))


def test_a_prompt_of_thousands(operator):
    check(operator, step(2, 1, 1500, 1, 2, 64, 800, 2, torch.bfloat16, full=True))


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


def check_every_kernel() -> None:
    """What the processes below run."""
    torch.set_num_threads(1)
    operator = native.load().op("cache_attention")
    for dtype in (f32, bf16):
        for seed, shape in enumerate(EVERY_KERNEL):
            check(operator, step(seed, *shape, dtype, full=True))
    check(operator, step(1, 1, 3, 1, 2, 64, 140, 2, f32, bf16, full=True))
    for queries in (1, 45):
        check_weights_add_up_to_one(operator, queries)
    check_few_queries_have_the_bits_of_one_each(operator)


@pytest.mark.parametrize("level", LEVELS)
def test_every_instruction_set_agrees_with_float64(operator, level):
    code = f"from {__name__} import check_every_kernel; check_every_kernel(); print('fine')"
    assert run_at(native.load(), level, code) == "fine"


@pytest.mark.parametrize("dtype", [f32, bf16])
@pytest.mark.parametrize(("queries", "group"), [(1, 2), (3, 2), (40, 2), (1, 40)])
def test_bits_depend_neither_on_threads_nor_on_the_batch(operator, dtype, queries, group):
    """Seven rows are cut by tiles, one row by pieces of its context; the other rows are broken."""
    whole = step(3, 7, queries, 5, group, 64, 300, 2, dtype, full=True)
    whole.q[1:].fill_(NAN)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results += [whole.copy().run(operator)[:1], whole.row(0).run(operator)]
    finally:
        torch.set_num_threads(threads)
    assert results[0].isfinite().all()
    for other in results[1:]:
        assert torch.equal(other, results[0])


def check_few_queries_have_the_bits_of_one_each(operator: Any) -> None:
    shapes = [*itertools.product((2, 5, 16), (1, 2, 3, 8, 12)), (6, 12), (11, 12)]  # the last leave few rows in a tile
    for dtype, (queries, group), dim in itertools.product((f32, bf16), shapes, (8, 64)):
        whole = step(queries, 2, queries, 2, group, dim, 300, 1, dtype, full=True)
        together, alone = whole.copy().run(operator), whole.copy()
        for place in range(queries):
            one = {name: getattr(alone, name)[:, place : place + 1] for name in ("q", "k", "v")}
            call = replace(alone, **one, start=alone.start + place, length=torch.ones_like(alone.length))
            assert torch.equal(call.run(operator)[:, 0], together[:, place]), (dtype, queries, group, dim, place)


def test_few_queries_have_the_bits_of_one_each(operator):
    """A draft that is verified in one call gets the numbers that decode would have given it, token by token."""
    check_few_queries_have_the_bits_of_one_each(operator)


def test_a_broken_row_is_seen_as_broken(operator):
    call = step(4, 2, 1, 2, 2, 64, 200, 1, full=True)
    call.k[1] = NAN
    result = call.copy().run(operator)
    assert result[0].isfinite().all() and result[1].isnan().all()


def test_scores_far_apart(operator):
    """Weights that underflow, a chunk that outweighs those before it, and a factor below zero."""
    call = step(5, 1, 2, 1, 2, 32, 400, 1, full=True)
    call.k_cache[:, :, 350:] *= 100
    for scale in (1.0, -1.0, 0.0):
        check(operator, replace(call, scale=scale))


def test_strides_of_operands_and_caches(operator):
    """Heads before positions, positions before heads, a last dimension that is not dense."""
    call = step(6, 2, 4, 2, 2, 64, 60, 2, full=True)
    expected = check(operator, call)
    turned = {name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
    assert torch.equal(check(operator, replace(call, **turned)), expected)
    spread = {name: getattr(call, name).transpose(2, 3).contiguous().transpose(2, 3) for name in ("q", "k", "v")}
    assert torch.equal(check(operator, replace(call, **spread)), expected)
    caches = {name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    assert torch.equal(replace(call, **caches).run(operator), expected)


def test_nothing_to_do(operator):
    for rows, queries in ((0, 3), (2, 0)):
        empty = step(7, 2, 3, 2, 2, 16, 8, 1)
        cut = {name: getattr(empty, name)[:rows, :queries] for name in ("q", "k", "v")}
        cut |= {name: getattr(empty, name)[:rows] for name in ("table", "start", "length")}
        assert replace(empty, **cut).run(operator).shape == (rows, queries, 4, 16)
    idle = replace(empty, length=torch.tensor([0, 0]))
    before = idle.k_cache.clone()
    assert torch.equal(idle.run(operator), torch.zeros(2, 3, 4, 16))
    assert torch.equal(idle.k_cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": [[0, 5], [1, 9]]}, r"block_table\[0, 1\] = 5 is none of the cache's 5 blocks"),
        ({"table": [[0, -1], [1, 2]]}, r"block_table\[0, 1\] = -1 is none"),
        ({"start": [3, -2]}, r"start\[1\] = -2 is negative"),
        ({"length": [1, 4]}, r"length\[1\] = 4 is not in 0 \.\. 3"),
        ({"length": [-1, 1]}, r"length\[0\] = -1 is not in 0 \.\. 3"),
        ({"table": [[0, 1, 2]]}, r"block_table has shape \[1, 3\], not \[2, 3\]"),
    ],
)
def test_what_would_leave_the_cache_is_refused_and_nothing_is_written(operator, change, message):
    call = replace(step(8, 2, 3, 2, 2, 16, 8, 2), start=torch.tensor([6, 7]), length=torch.tensor([3, 3]))
    call = replace(call, **{name: torch.tensor(value) for name, value in change.items()})
    before = call.k_cache.clone(), call.v_cache.clone()
    with pytest.raises(RuntimeError, match=message):
        call.run(operator)
    assert torch.equal(call.k_cache.nan_to_num(), before[0].nan_to_num())
    assert torch.equal(call.v_cache.nan_to_num(), before[1].nan_to_num())


def test_table_entries_that_no_live_position_uses_are_not_looked_at(operator):
    call = step(9, 1, 1, 2, 2, 16, 8, 3)
    call = replace(call, start=torch.tensor([7]), length=torch.tensor([1]), table=torch.tensor([[1, -7, 10**12]]))
    call.k_cache[1, :, :7], call.v_cache[1, :, :7] = 1.0, 2.0
    assert call.run(operator).isfinite().all()


class Attend(torch.nn.Module):
    """Two layers' worth of updates, so that a compiler has something to reorder."""

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


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_traced_graph_updates_its_caches_in_place(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("NXD_INFER_CACHE_LIMIT", "0")  # what the compiler writes is looked at
    generator = torch.Generator().manual_seed(10)
    calls = []
    for start in (0, 3, 6):
        x = torch.randn(2, 3, 8, 16, generator=generator)
        calls.append((x, torch.tensor([[1], [0]]), torch.tensor([start, start]), torch.tensor([3, 3])))
    plain = Attend()
    arguments = {"tp_degree": 1, "checkpoint_loader_callable": dict, "inline_weights_to_neff": False}
    with parallel_model_trace(attend, calls[0], compiler_workdir=tmp_path, backend=backend, **arguments) as model:
        model.reset_states()
        for call in calls:
            torch.testing.assert_close(model(*call), plain(*call), rtol=1e-5, atol=1e-5)
        message = r"rank 0 of 1 raised: .*block_table\[0, 0\] = 7 is none of the cache's 3 blocks"
        with pytest.raises(RankFailedError, match=message):
            model(calls[0][0], torch.tensor([[7], [0]]), *calls[0][2:])
    if backend == "inductor":
        (wrapper,) = tmp_path.rglob("*.wrapper.cpp")
        code = wrapper.read_text()
        assert code.count("(aoti_torch_cpu_cache_attention(") == 2, "the native operator is called, past torch"
        # 77 stands in the caches' shape alone: nothing but a check of the inputs may name it.
        naming = [line for line in code.splitlines() if "77L" in line]
        assert naming and all("assert_size_stride(arg" in line for line in naming)
