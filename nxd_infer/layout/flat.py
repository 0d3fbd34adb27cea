"""Rectangles of tensors as bounds and as slices, and ranges of flattened tensors as rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

Bounds = tuple[tuple[int, int], ...]
"""``(start, stop)`` per dimension."""


def bounds_of(slices: Sequence[slice] | None, shape: Sequence[int]) -> Bounds:
    """Return the bounds of ``slices`` (step 1) of a tensor of ``shape``; None: of all of it."""
    return tuple(s.indices(n)[:2] for s, n in zip(slices or [slice(None)] * len(shape), shape, strict=True))


def slices_of(bounds: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the slices that :func:`bounds_of` turns into ``bounds``."""
    return tuple(slice(start, stop) for start, stop in bounds)


def flat_rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[Bounds]:
    """Yield elements ``start..stop`` of a flattened tensor of ``shape`` as contiguous rectangles, in order.

    There are at most ``2 * dimensions - 1``.
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    inner = math.prod(shape[1:])
    (first, offset), (last, rest) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _within(first, shape, offset, rest)
        return
    if offset:
        yield from _within(first, shape, offset, inner)
        first += 1
    if first < last:
        yield ((first, last), *((0, n) for n in shape[1:]))
    if rest:
        yield from _within(last, shape, 0, rest)


def _within(row: int, shape: Sequence[int], start: int, stop: int) -> Iterator[Bounds]:
    for inner in flat_rectangles(shape[1:], start, stop):
        yield ((row, row + 1), *inner)


def overlap(first: Bounds, second: Bounds) -> Bounds | None:
    """Return the intersection of two rectangles, or None."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return None if any(a >= b for a, b in both) else both


def relative(bounds: Bounds, origin: Bounds) -> tuple[slice, ...]:
    """Return the slices of ``bounds`` in a tensor that starts at the low corner of ``origin``."""
    return tuple(slice(a - low, b - low) for (a, b), (low, _) in zip(bounds, origin, strict=True))


def moved(bounds: Bounds, source: Bounds, target: Bounds) -> Bounds:
    """Translate ``bounds`` inside ``source`` to bounds inside ``target``, a rectangle of the same shape."""
    shifts = zip(bounds, source, target, strict=True)
    return tuple((a - low + to, b - low + to) for (a, b), (low, _), (to, _) in shifts)


def flat_index(corner: Bounds, shape: Sequence[int]) -> int:
    """Return the index of the low corner of ``corner`` in the flattened tensor of ``shape``."""
    index = 0
    for (low, _), size in zip(corner, shape, strict=True):
        index = index * size + low
    return index
