"""Heads: padded and sharded attention equals the plain one for every degree, number of heads and of kv heads."""

import pytest
import torch

from nxd_infer.errors import ShardingError
from nxd_infer.layout import MergedSource, gqa_plan, shard_tensor, sum_duplicates
from tests.support.layout.attention import Shape, logical_weights, padded_layouts, plain_attention, torn_layouts

HEADS = range(1, 17)
DEGREES = range(1, 9)


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize("degree", DEGREES)
def test_every_combination_forward_and_backward(degree):
    for heads in HEADS:
        for kv_heads in divisors(heads):
            check_combination(Shape(heads, kv_heads), degree)


def check_combination(shape, degree):
    what = f"tp {degree}, heads {shape.heads}, kv heads {shape.kv_heads}"
    logical = logical_weights(shape)
    x = torch.randn(shape.length, shape.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    seen = torch.randn(shape.length, shape.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    reference = {name: tensor.clone().requires_grad_() for name, tensor in logical.items()}
    expected = plain_attention(x, reference, shape, shape.heads, shape.kv_heads)
    expected.backward(seen)

    # Loaded after padding: logical weights straight into padded shards.
    layouts = padded_layouts(shape, degree)
    ranks = [
        {name: shard_tensor(logical, layout.rank_layout(degree, rank)) for name, layout in layouts.items()}
        for rank in range(degree)
    ]
    # Loaded before padding: unpadded shards, with heads torn over ranks, merged and cut again.
    torn = torn_layouts(shape, degree)
    before = MergedSource(
        [
            {name: shard_tensor(logical, layout.rank_layout(degree, rank)) for name, layout in torn.items()}
            for rank in range(degree)
        ],
        torn,
    )
    for rank in range(degree):
        for name, layout in layouts.items():
            assert torch.equal(shard_tensor(before, layout.rank_layout(degree, rank)), ranks[rank][name]), what

    plan = gqa_plan(shape.heads, shape.kv_heads, degree)
    for rank in ranks:
        for tensor in rank.values():
            tensor.requires_grad_()
    total = sum(plain_attention(x, rank, shape, plan.heads_per_rank, plan.kv_heads_per_rank) for rank in ranks)
    assert (total - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max().item()), what
    total.backward(seen)
    for name, layout in layouts.items():
        gradient = sum_duplicates([rank[name].grad for rank in ranks], layout)[name]
        scale = max(1.0, reference[name].grad.abs().max().item())
        assert (gradient - reference[name].grad).abs().max() <= 1e-10 * scale, f"{what}: {name}"


@pytest.mark.parametrize("degree", DEGREES)
def test_a_rank_has_the_fewest_query_heads_and_then_the_fewest_kv_heads(degree):
    """The chosen numbers against a search over all of them, and against the formula of the API guide."""
    for heads in HEADS:
        for kv_heads in divisors(heads):
            plan = gqa_plan(heads, kv_heads, degree)
            possible = [
                (k * g, k)
                for k in range(1, heads + 1)
                for g in range(1, heads + 1)
                if kv_heads * -(-heads // kv_heads // g) <= degree * k
            ]
            assert (plan.heads_per_rank, plan.kv_heads_per_rank) == min(possible)
            assert plan.heads_per_rank * degree == heads + (-heads % degree)
            held = [h for rank in range(degree) for h in plan.query_heads(rank)]
            assert sorted(h for h in held if h is not None) == list(range(heads))
            assert {h for rank in range(degree) for h in plan.key_value_heads(rank)} - {None} == set(range(kv_heads))


def test_a_multiplier_sets_the_kv_heads_of_a_rank_where_it_costs_no_query_head():
    assert gqa_plan(8, 2, 4, kv_size_multiplier=2).kv_heads_per_rank == 1
    assert gqa_plan(8, 2, 4, kv_size_multiplier=4).kv_heads_per_rank == 2
    assert gqa_plan(20, 4, 4, kv_size_multiplier=2).kv_heads_per_rank == 1, "2 would need 6 query heads a rank, not 5"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (0, 1), (4, 0), (2, 4)])
def test_heads_that_cannot_share_are_refused(heads, kv_heads):
    with pytest.raises(ShardingError, match="kv heads must be one of"):
        gqa_plan(heads, kv_heads, 2)


def test_multiplied_kv_heads_stay_exact():
    """The plans with a multiplier pass the same test as those without."""
    from tests.support.layout.attention import layouts_of

    for heads, kv_heads, degree, multiplier in [(8, 2, 4, 2), (8, 2, 4, 4), (6, 3, 2, 2), (12, 4, 8, 2), (16, 2, 8, 8)]:
        shape = Shape(heads, kv_heads)
        plan = gqa_plan(heads, kv_heads, degree, kv_size_multiplier=multiplier)
        layouts = layouts_of(plan.q_axis(2), plan.kv_axis(2), shape.hidden)
        logical = logical_weights(shape)
        x = torch.randn(shape.length, shape.hidden, dtype=torch.float64)
        ranks = [
            {name: shard_tensor(logical, layout.rank_layout(degree, rank)) for name, layout in layouts.items()}
            for rank in range(degree)
        ]
        total = sum(plain_attention(x, rank, shape, plan.heads_per_rank, plan.kv_heads_per_rank) for rank in ranks)
        expected = plain_attention(x, logical, shape, heads, kv_heads)
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
