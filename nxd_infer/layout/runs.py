"""Runs: the composition of one rank's tensor, axis by axis.

An axis of a rank's tensor is a list of :class:`Run` (elements ``start..stop`` of an axis of a logical tensor) and
:class:`Fill` (padding, which belongs to no logical tensor). A tensor has one such list per dimension. Sharding,
padding, replication, fusing and striding are all such lists, so one module can cut, merge, compare and describe every
weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from nxd_infer.errors import ShardingError
from nxd_infer.layout.flat import slices_of


@dataclass(frozen=True)
class Run:
    """Elements ``start..stop`` of one axis of the logical tensor ``name``; "" is the tensor's own source."""

    name: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ShardingError(f"a run must have 0 <= start <= stop, got {self.start}..{self.stop} of {self.name!r}")

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fill:
    """Padding: ``n`` elements of constant ``value`` without a counterpart in the logical tensor."""

    value: float
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ShardingError(f"a fill must have n >= 0, got {self.n}")

    def __len__(self) -> int:
        return self.n


Piece: TypeAlias = Run | Fill
AxisLayout: TypeAlias = tuple[Piece, ...]


def axis_length(axis: Iterable[Piece]) -> int:
    """Return the total number of elements of the pieces."""
    return sum(len(piece) for piece in axis)


def coalesce(axis: Iterable[Piece]) -> AxisLayout:
    """Return the axis without empty pieces, and with adjacent contiguous pieces joined."""
    out: list[Piece] = []
    for piece in axis:
        if not len(piece):
            continue
        last = out[-1] if out else None
        if isinstance(piece, Run) and isinstance(last, Run) and (last.name, last.stop) == (piece.name, piece.start):
            out[-1] = Run(last.name, last.start, piece.stop)
        elif isinstance(piece, Fill) and isinstance(last, Fill) and last.value == piece.value:
            out[-1] = Fill(last.value, last.n + piece.n)
        else:
            out.append(piece)
    return tuple(out)


def cut(axis: Iterable[Piece], start: int, stop: int) -> AxisLayout:
    """Return elements ``start..stop`` of an axis. Raises ShardingError if it is shorter than ``stop``."""
    out: list[Piece] = []
    at = 0
    for piece in axis:
        low, high = max(start - at, 0), min(stop - at, len(piece))
        if low < high:
            out.append(
                Run(piece.name, piece.start + low, piece.start + high)
                if isinstance(piece, Run)
                else Fill(piece.value, high - low)
            )
        at += len(piece)
    if not 0 <= start <= stop <= at:
        raise ShardingError(f"cannot cut {start}..{stop} out of an axis of {at} elements")
    return coalesce(out)


def shift(axis: Iterable[Piece], offset: int) -> AxisLayout:
    """Return the axis with all runs moved by ``offset`` elements of the logical axis."""
    return tuple(Run(p.name, p.start + offset, p.stop + offset) if isinstance(p, Run) else p for p in axis)


def rename(axis: Iterable[Piece], name: str) -> AxisLayout:
    """Return the axis with every run taken from ``name``."""
    return tuple(Run(name, p.start, p.stop) if isinstance(p, Run) else p for p in axis)


@dataclass(frozen=True)
class Block:
    """A rectangle that a rank's tensor shares with a logical one: ``local[block.local] == logical[block.logical]``."""

    name: str
    logical: tuple[tuple[int, int], ...]
    """``(start, stop)`` in the logical tensor, per dimension."""
    local: tuple[tuple[int, int], ...]
    """``(start, stop)`` in the rank's tensor, per dimension."""

    @property
    def logical_slices(self) -> tuple[slice, ...]:
        return slices_of(self.logical)

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return slices_of(self.local)

    @property
    def numel(self) -> int:
        return math.prod(stop - start for start, stop in self.local)

    def pieces(self, numel: int) -> Iterator[Block]:
        """Split the block along its first dimension into blocks of about ``numel`` elements, at least one row each."""
        rows = self.local[0][1] - self.local[0][0] if self.local else 1
        step = max(1, numel * rows // max(1, self.numel))
        if step >= rows:
            yield self
            return
        for first in range(0, rows, step):
            last = min(first + step, rows)
            (here, _), (there, _) = self.local[0], self.logical[0]
            logical = ((there + first, there + last), *self.logical[1:])
            yield Block(self.name, logical, ((here + first, here + last), *self.local[1:]))


@dataclass(frozen=True)
class TensorLayout:
    """One rank's tensor: a list of pieces per dimension.

    ``source`` is the logical tensor of runs whose name is "". At most one axis may name tensors itself (a fused
    weight), because a rectangle between two such axes would be ambiguous.
    """

    axes: tuple[AxisLayout, ...]
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(coalesce(axis) for axis in self.axes))
        naming = [i for i, axis in enumerate(self.axes) if any(isinstance(p, Run) and p.name for p in axis)]
        if len(naming) > 1:
            raise ShardingError(f"only one axis may name logical tensors, but axes {naming} do")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis_length(axis) for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The logical tensors with elements here, in order of first appearance."""
        return tuple(dict.fromkeys(block.name for block in self.blocks()))

    @property
    def filled(self) -> bool:
        """Whether any element is padding."""
        return any(isinstance(piece, Fill) for axis in self.axes for piece in axis)

    def blocks(self, edges: Sequence[Mapping[str, set[int]]] | None = None) -> Iterator[Block]:
        """Yield the rectangles from logical tensors, in the order of the rank's tensor.

        ``edges`` splits them further: per dimension and run's name, where in the logical tensor.
        """
        axes = [[(at, piece) for at, piece in _spans(axis) if isinstance(piece, Run)] for axis in self.axes]
        if edges is not None:
            axes = [list(_split(axis, places)) for axis, places in zip(axes, edges, strict=True)]
        for runs in itertools.product(*axes):
            name = next((run.name for _, run in runs if run.name), self.source)
            logical = tuple((run.start, run.stop) for _, run in runs)
            yield Block(name, logical, tuple((at, at + len(run)) for at, run in runs))

    def fills(self) -> Iterator[tuple[tuple[slice, ...], float]]:
        """Yield the padding slices of the rank's tensor and their values; the first padded axis wins."""
        for dim, axis in enumerate(self.axes):
            for at, piece in _spans(axis):
                if isinstance(piece, Fill):
                    whole = [slice(None)] * len(self.axes)
                    whole[dim] = slice(at, at + piece.n)
                    yield tuple(whole), piece.value

    def cut(self, dim: int, start: int, stop: int) -> TensorLayout:
        """Return the layout of ``tensor.narrow(dim, start, stop - start)``."""
        axes = list(self.axes)
        axes[dim] = cut(axes[dim], start, stop)
        return TensorLayout(tuple(axes), self.source)

    def to_json(self) -> dict[str, Any]:
        """Return ``{"source": name, "axes": [[[name, start, stop] | [fill, n], ...], ...]}`` of plain JSON values."""
        return {"source": self.source, "axes": [[_piece_to_json(piece) for piece in axis] for axis in self.axes]}

    @staticmethod
    def from_json(data: Any) -> TensorLayout:
        """Invert :meth:`to_json`. Raises ShardingError if ``data`` is not such a description."""
        try:
            axes = tuple(tuple(_piece_from_json(piece) for piece in axis) for axis in data["axes"])
            source = data["source"]
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ShardingError(f"not the description of a tensor layout: {error!r} in {str(data)[:200]}") from error
        if not isinstance(source, str):
            raise ShardingError(f"the source of a tensor layout must be a name, got {source!r}")
        return TensorLayout(axes, source)


def _spans(axis: Sequence[Piece]) -> Iterator[tuple[int, Piece]]:
    """Yield each piece with its start position."""
    at = 0
    for piece in axis:
        yield at, piece
        at += len(piece)


def _split(axis: Iterable[tuple[int, Run]], edges: Mapping[str, set[int]]) -> Iterator[tuple[int, Run]]:
    for at, run in axis:
        inside = sorted(edge for edge in edges[run.name] if run.start <= edge <= run.stop)
        for start, stop in itertools.pairwise(inside):
            yield at + start - run.start, Run(run.name, start, stop)


def _piece_to_json(piece: Piece) -> list[Any]:
    if isinstance(piece, Run):
        return [piece.name, piece.start, piece.stop]
    # JSON has no infinity and no nan: they are stored as text, which float() reads.
    return [piece.value if math.isfinite(piece.value) else str(piece.value), piece.n]


def _piece_from_json(data: Any) -> Piece:
    if not isinstance(data, list) or len(data) not in (2, 3):
        raise ShardingError(f"a piece must be [name, start, stop] or [fill, n], got {data!r}")
    *_, last = data
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in (last, data[-2] if data[2:] else 0)):
        raise ShardingError(f"the bounds of a piece must be whole numbers, got {data!r}")
    if len(data) == 3:
        if not isinstance(data[0], str):
            raise ShardingError(f"the name of a run must be text, got {data[0]!r}")
        return Run(data[0], data[1], data[2])
    return Fill(float(data[0]), data[1])
