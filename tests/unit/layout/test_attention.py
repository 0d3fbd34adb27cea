"""Heads: padded and sharded attention equals the plain one, whatever the degree and the numbers of heads."""

from __future__ import annotations

import pytest
import torch

from nxd_infer.errors import ShardingError
from nxd_infer.layout import gqa_plan, shard_tensor, sum_duplicates
from tests.support.layout.attention import Shape, layouts_of, logical_weights, plain_attention


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@pytest.mark.parametrize(
    ("degree", "heads", "kv_heads", "multiplier"),
    [(1, 6, 3, 0), (2, 5, 1, 0), (3, 16, 4, 0), (4, 16, 16, 0), (8, 14, 7, 0), (4, 8, 2, 4), (8, 12, 4, 2)],
)
def test_forward_and_backward_equal_the_plain_ones(degree: int, heads: int, kv_heads: int, multiplier: int):
    shape = Shape(heads, kv_heads)
    plan = gqa_plan(heads, kv_heads, degree, kv_size_multiplier=multiplier)
    logical = logical_weights(shape)
    x, seen = torch.randn(2, shape.length, shape.hidden, dtype=torch.float64)
    reference = {name: tensor.clone().requires_grad_() for name, tensor in logical.items()}
    expected = plain_attention(x, reference, shape, shape.heads, shape.kv_heads)
    expected.backward(seen)

    layouts = layouts_of(plan.q_axis(shape.head_dim), plan.kv_axis(shape.head_dim), shape.hidden)
    ranks = [
        {name: shard_tensor(logical, layout.rank_layout(degree, rank)) for name, layout in layouts.items()}
        for rank in range(degree)
    ]
    for rank in ranks:
        for tensor in rank.values():
            tensor.requires_grad_()
    total = sum(plain_attention(x, rank, shape, plan.heads_per_rank, plan.kv_heads_per_rank) for rank in ranks)
    assert (total - expected).abs().max() <= 1e-10 * max(1.0, expected.abs().max().item())
    total.backward(seen)
    for name, layout in layouts.items():
        gradient = sum_duplicates([rank[name].grad for rank in ranks], layout)[name]
        scale = max(1.0, reference[name].grad.abs().max().item())
        assert (gradient - reference[name].grad).abs().max() <= 1e-10 * scale, name


def test_a_rank_has_the_fewest_query_heads_and_then_the_fewest_kv_heads():
    """The chosen numbers against a search over all of them, and against the formula of the API guide."""
    for degree in range(1, 9):
        for heads in range(1, 13):
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
                assert {h for rank in range(degree) for h in plan.key_value_heads(rank)} - {None} == set(
                    range(kv_heads)
                )


def test_a_multiplier_sets_the_kv_heads_of_a_rank_where_it_costs_no_query_head():
    assert gqa_plan(8, 2, 4, kv_size_multiplier=2).kv_heads_per_rank == 1
    assert gqa_plan(8, 2, 4, kv_size_multiplier=4).kv_heads_per_rank == 2
    assert gqa_plan(20, 4, 4, kv_size_multiplier=2).kv_heads_per_rank == 1, "2 would need 6 query heads a rank, not 5"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (0, 1), (4, 0), (2, 4)])
def test_heads_that_cannot_share_are_refused(heads: int, kv_heads: int):
    with pytest.raises(ShardingError, match="kv heads must be one of"):
        gqa_plan(heads, kv_heads, 2)
