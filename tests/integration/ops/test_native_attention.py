"""The native ``cache_attention`` against its reference in float64, at this machine's best instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer import native
from tests.support.needs import needs_native
from tests.support.ops.native_attention import NAN, bf16, check, eight_bits, f16, f32, f64, i8, step

pytestmark = needs_native


@pytest.fixture(scope="module")
def operator() -> Any:
    return native.load().op("cache_attention")


SHAPES = {
    "rows": st.integers(1, 3),
    "queries": st.sampled_from([1, 1, 2, 3, 5, 17, 40]),
    "kv_heads": st.integers(1, 3),
    "group": st.sampled_from([1, 2, 3, 4, 7]),
    "dim": st.sampled_from([1, 3, 16, 31, 64, 80, 128]),
    "block": st.sampled_from([1, 5, 16, 100, 150]),
    "blocks": st.integers(1, 3),
}


@pytest.mark.smoke
@settings(max_examples=30)
@given(
    **SHAPES,
    dtype=st.sampled_from([f32, bf16]),
    cache=st.sampled_from([None, i8]),
    full=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_equals_the_reference_in_float64(
    operator, seed, rows, queries, kv_heads, group, dim, block, blocks, dtype, cache, full
):
    check(operator, step(seed, rows, queries, kv_heads, group, dim, block, blocks, dtype, cache, full=full))


@pytest.mark.parametrize(
    ("dtype", "cache"),
    [(f64, f64), (f16, f16), (f32, bf16), (f32, f16), (f64, f32), (f64, bf16), (f16, f32), (f16, i8), (f64, i8)],
)
def test_other_dtypes_and_caches_of_another_dtype(operator, dtype, cache):
    for queries in (1, 30):
        check(operator, step(1, 2, queries, 2, 2, 16, 100, 2, dtype, cache, full=True))


def test_a_prompt_of_thousands(operator):
    check(operator, step(2, 1, 1500, 1, 2, 64, 800, 2, torch.bfloat16, full=True))


@pytest.mark.parametrize(("dtype", "cache"), [(f32, f32), (bf16, bf16), (bf16, i8)])
@pytest.mark.parametrize(("queries", "group"), [(1, 2), (3, 2), (40, 2), (1, 40)])
def test_bits_depend_neither_on_threads_nor_on_the_batch(operator, dtype, cache, queries, group):
    """Seven rows are cut by tiles, one row by pieces of its context; the other rows are broken."""
    whole = step(3, 7, queries, 5, group, 64, 300, 2, dtype, cache, full=True)
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


@pytest.mark.parametrize("cache", [f32, i8])
@pytest.mark.parametrize("broken", [NAN, float("inf")])
def test_a_broken_row_is_seen_as_broken(operator, cache, broken):
    call = step(4, 2, 1, 2, 2, 64, 200, 1, f32, cache, full=True)
    call.v[1, :, :, 7] = broken
    result = call.copy().run(operator)
    assert result[0].isfinite().all() and not result[1].isfinite().all(-1).any()


def test_a_cache_of_eight_bits_holds_each_entry_to_a_254th_of_its_largest_number(operator):
    """Zeros, tiny and large numbers; D numbers take D + 4 bytes."""
    call = step(4, 2, 5, 2, 1, 64, 8, 1, bf16, i8, full=True)
    call.k.mul_(torch.tensor([0.0, 1e-30, 1.0, 1e4, 1e37]).view(1, 5, 1, 1).to(bf16))
    call = replace(call, start=torch.zeros_like(call.start))
    call.run(operator)
    assert call.k_cache.nbytes == call.k_cache.shape[0] * 2 * 8 * (64 + 4)
    written = call.k_cache[call.table[:, 0], :, :5].transpose(1, 2)
    numbers = written[..., :64].float() * written[..., 64:].contiguous().view(f32)
    most = call.k.float().abs().amax(-1, keepdim=True)
    assert ((numbers - call.k.float()).abs() <= most / 253.9).all()
    assert torch.equal(written[:, 2:4], eight_bits(call.k.float())[:, 2:4])


def test_a_cache_of_eight_bits_without_scales_is_refused(operator):
    call = step(4, 1, 1, 1, 1, 16, 8, 1, f32, i8, full=True)
    with pytest.raises(RuntimeError, match=r"k_cache has shape \[2, 1, 8, 16\], not \[2, 1, 8, 20\]"):
        replace(call, k_cache=call.k_cache[..., :16]).run(operator)


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
