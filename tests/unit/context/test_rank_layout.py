"""Where every rank stands on every axis: a pure function, tested without processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxd_infer.context import (
    AXES,
    LOCAL,
    current_context,
    make_context,
    rank_layout,
    ring_order,
    set_default_context,
    use_context,
)
from nxd_infer.errors import ParallelConfigError

sizes = st.integers(1, 4)


@settings(max_examples=25)
@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_every_axis_splits_the_world_into_equal_groups(tp, cp, dp, pp):
    world = tp * cp * dp * pp
    layout = rank_layout(world, tp, pp, cp)
    assert (layout.tp, layout.cp, layout.dp, layout.pp) == (tp, cp, dp, pp)
    for name in AXES:
        groups = layout.groups(name)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {layout.degree(name)}
        assert groups == sorted(groups)
        for rank in range(world):
            axis = layout.axis(name, rank)
            assert axis.ranks[axis.rank] == rank
            assert list(axis.ranks) in groups
    for rank in range(world):  # row-major over [pipeline, data, context, tensor]
        places = {name: layout.axis(name, rank).rank for name in AXES}
        assert ((places["pp"] * dp + places["dp"]) * cp + places["cp"]) * tp + places["tp"] == rank


def test_the_documented_order_of_sixteen_ranks():
    layout = rank_layout(16, 4, 2)
    assert layout.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.groups("dp") == [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert layout.groups("pp") == [[r, r + 8] for r in range(8)]
    assert layout.groups("cp") == [[r] for r in range(16)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((4, 3), "does not divide the world of 4 ranks.*can be one of \\[1, 2, 4\\]"),
        ((2, 64), "does not divide the world of 2 ranks"),
        ((8, 2, 3), "does not divide"),
        ((4, 0), "at least 1"),
        ((4, -2), "at least 1"),
        ((4, 2.0), "whole number"),
        ((4, True), "whole number"),
        ((0,), "world size must be at least 1"),
    ],
)
def test_impossible_degrees_name_the_value_and_the_possible_ones(arguments, said):
    with pytest.raises(ParallelConfigError, match=said):
        rank_layout(*arguments)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ParallelConfigError, match="rank 4 is outside the world of 4"):
        make_context(4, 4)


def test_an_override_belongs_to_its_block_and_thread():
    import threading

    inside = make_context(4, 3, tp=2)
    seen = []
    with use_context(inside):
        assert current_context() is inside
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join()
    assert current_context() is LOCAL and seen == [LOCAL]
    default = make_context(2, 1, tp=2)
    set_default_context(default)
    try:
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join()
        assert seen[-1] is default
    finally:
        set_default_context(None)


@settings(max_examples=25)
@given(tp=sizes, cp=sizes, dp=sizes, pp=sizes)
def test_ranks_with_the_same_weights(tp, cp, dp, pp):
    """Data parallel groups, joined over context parallelism: all ranks of one stage and one tensor-parallel place."""
    layout = rank_layout(tp * cp * dp * pp, tp, pp, cp)
    groups = layout.replica_groups()
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {dp * cp} and len(groups) == tp * pp
    for group in groups:
        assert len({(layout.axis("pp", rank).rank, layout.axis("tp", rank).rank) for rank in group}) == 1
    if cp == 1:
        assert groups == layout.groups("dp")


@pytest.mark.parametrize("degree", [*range(1, 10), 64])
def test_rings(degree: int):
    """On an open row of devices no hop of the folded ring, the closing one included, is longer than two."""
    layout = rank_layout(2 * degree, degree)
    assert layout.groups("tp", "ascending") == layout.groups("tp") == [[*range(degree)], [*range(degree, 2 * degree)]]
    ring = ring_order(degree, "ascending_descending")
    assert sorted(ring) == list(range(degree))
    assert all(abs(a - b) <= 2 for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))
    assert layout.groups("tp", "ascending_descending") == [ring, [place + degree for place in ring]]
    with pytest.raises(ParallelConfigError, match="one of 'ascending', 'ascending_descending', got 'spiral'"):
        layout.groups("tp", "spiral")
