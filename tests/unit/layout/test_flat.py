"""Flat ranges as rectangles, against the flattened tensor itself."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from nxd_infer.layout.flat import flat_index, flat_rectangles, moved, overlap, relative


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
