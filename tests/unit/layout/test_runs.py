"""Runs, plans and flat ranges: cutting, joining, JSON, and the indices that lay an axis out and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan, Fill, ParamLayout, Run, TensorLayout
from nxd_infer.layout.flat import flat_index, flat_rectangles, moved, overlap, relative
from nxd_infer.layout.runs import axis_length, coalesce, cut

RUNS = st.builds(lambda start, n: Run("", start, start + n), st.integers(0, 20), st.integers(0, 9))

FILLS = st.builds(Fill, st.sampled_from([0.0, -1.5, float("-inf")]), st.integers(0, 5))

AXES = st.lists(RUNS | FILLS, max_size=8).map(tuple)


def elements(axis: Any) -> list[Any]:
    """The axis spelled out, one entry an element."""
    return [
        (piece.name, piece.start + i) if isinstance(piece, Run) else piece.value
        for piece in axis
        for i in range(len(piece))
    ]


@given(AXES, AXES, st.data())
def test_cut_coalesce_and_json_keep_the_elements(axis: Any, other: Any, data: st.DataObject):
    length = axis_length(axis)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    assert elements(coalesce(axis)) == elements(axis)
    assert elements(cut(axis, start, stop)) == elements(axis)[start:stop]
    assert all(len(piece) for piece in coalesce(axis))
    layout = TensorLayout((axis, other), "model.weight")
    assert TensorLayout.from_json(json.loads(json.dumps(layout.to_json(), allow_nan=False))) == layout


@pytest.mark.parametrize(
    "data",
    [
        None,
        {"axes": [], "source": 3},
        {"axes": [[["", 0]]], "source": ""},
        {"axes": [[["", 0, 1.5]]], "source": ""},
        {"axes": [[["", 5, 2]]], "source": ""},
        {"axes": [[[0.0, -2]]], "source": ""},
        {"axes": [[[7, 0, 2]]], "source": ""},
        {"axes": [["abc"]], "source": ""},
    ],
)
def test_json_that_describes_no_layout_is_refused(data: Any):
    with pytest.raises(ShardingError):
        TensorLayout.from_json(data)


def test_an_axis_that_does_not_divide_says_so_and_lists_what_does():
    plan = AxisPlan.even(10)
    assert plan.exact(5) and not plan.exact(4)
    with pytest.raises(ShardingError, match=r"output_size = 10 does not divide over 4 ranks.* 1, 2, 5, 10.*pad_model"):
        plan.require_exact(4, "output_size")
    AxisPlan.padded(10).require_exact(4, "output_size")
    assert not AxisPlan.strided(10, 2).exact(2)
    assert AxisPlan.recut(plan, 5).exact(5)


def test_what_makes_no_plan_is_refused():
    with pytest.raises(ShardingError, match="3 sections"):
        AxisPlan.strided(10, 3)
    with pytest.raises(ParallelConfigError, match="rank 2 is outside a group of 2"):
        AxisPlan.even(4).runs(2, 2)
    with pytest.raises(ParallelConfigError, match="at least 1"):
        AxisPlan.even(4).runs(0, 0)
    with pytest.raises(ShardingError, match=r"3\.\.7 out of an axis of 6"):
        cut((Run("", 0, 6),), 3, 7)
    with pytest.raises(ShardingError, match="only one axis"):
        TensorLayout(((Run("a", 0, 2),), (Run("b", 0, 2),)))
    for parts in ({"": AxisPlan.even(4)}, {"a": AxisPlan.replicated(4)}):
        with pytest.raises(ShardingError):
            AxisPlan.fused(parts)


def test_sources_must_name_every_part():
    plan = AxisPlan.fused({"q": AxisPlan.even(4), "k": AxisPlan.even(4)})
    with pytest.raises(ShardingError, match="parts"):
        ParamLayout.of([plan, 3], {"q": "q.weight"})
    layout = ParamLayout.of([plan, 3], {"q": "q.weight", "k": "k.weight"})
    assert layout.logical_shapes == {"q.weight": (4, 3), "k.weight": (4, 3)}
    assert layout.rank_layout(2, 1).axes[0] == (Run("q.weight", 2, 4), Run("k.weight", 2, 4))
    assert layout.partition_dim == 0 and layout.rank_shape(2) == (4, 3)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[list[int], int, int]:
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_rectangles_of_a_flat_range(case: tuple[list[int], int, int]):
    shape, start, stop = case
    tensor = torch.arange(math.prod(shape)).view(shape)
    found = list(flat_rectangles(shape, start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    pieces = [tensor[tuple(slice(*bounds) for bounds in rectangle)].reshape(-1) for rectangle in found]
    joined = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    assert joined.tolist() == list(range(start, stop))
    assert [int(piece[0]) for piece in pieces] == [flat_index(rectangle, shape) for rectangle in found]


def test_rectangles_in_each_other():
    assert overlap(((0, 4), (2, 5)), ((3, 6), (0, 3))) == ((3, 4), (2, 3))
    assert overlap(((0, 4), (2, 5)), ((4, 6), (0, 3))) is None
    assert relative(((3, 4), (2, 3)), ((1, 4), (2, 5))) == (slice(2, 3), slice(0, 1))
    assert moved(((3, 4), (2, 3)), ((3, 6), (0, 3)), ((10, 13), (20, 23))) == ((10, 11), (22, 23))
