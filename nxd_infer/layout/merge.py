"""Read logical tensors from the ranks' ones, slice by slice, and find out which rank holds what.

Each element is read from its *first owner*, the lowest rank that holds it, so it is enough if only owners save their
shards. ``holdings`` is the basis: every rectangle of every logical tensor with all places that hold it.
:class:`RunsSource` is a weight source like any other: a model of another degree reads its slices from it, and tools
read full tensors one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.flat import Bounds, bounds_of, flat_index, flat_rectangles, moved, overlap, relative, slices_of
from nxd_infer.layout.params import ParamLayout
from nxd_infer.layout.runs import Block, Run, TensorLayout
from nxd_infer.layout.sources import DictSource, Slices, Weights, WeightSource, as_source, unknown_name


@dataclass(frozen=True)
class Holding:
    """A rectangle of a logical tensor that is contiguous on each of its holders."""

    name: str
    logical: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """``(rank, bounds in the rank's tensor)``; the first is the owner."""

    @property
    def logical_slices(self) -> tuple[slice, ...]:
        return slices_of(self.logical)

    @property
    def owner(self) -> int:
        return self.places[0][0]


def holdings(layout: ParamLayout, degree: int) -> list[Holding]:
    """Return which ranks of ``degree`` hold which rectangles of a parameter's logical tensors."""
    return shared_holdings([layout.rank_layout(degree, rank) for rank in range(degree)])


def shared_holdings(ranks: Sequence[TensorLayout]) -> list[Holding]:
    """Return the holdings for the given tensors of one parameter; a rank is an index into ``ranks``."""
    # Runs of different ranks may overlap partly: split all of them wherever any starts or ends.
    edges: list[dict[str, set[int]]] = [{} for _ in ranks[0].axes]
    for rank in ranks:
        for dim, axis in enumerate(rank.axes):
            for piece in axis:
                if isinstance(piece, Run):
                    edges[dim].setdefault(piece.name, set()).update((piece.start, piece.stop))
    places: dict[tuple[str, Bounds], list[tuple[int, Bounds]]] = {}
    for rank, rank_layout in enumerate(ranks):
        for block in rank_layout.blocks(edges):
            places.setdefault((block.name, block.logical), []).append((rank, block.local))
    return [Holding(name, logical, tuple(held)) for (name, logical), held in places.items()]


def owned_blocks(layout: ParamLayout, degree: int, rank: int) -> list[Block]:
    """Return the rectangles whose first owner is ``rank``: those that it saves and counts in a norm."""
    return [Block(h.name, h.logical, h.places[0][1]) for h in holdings(layout, degree) if h.owner == rank]


def is_saved_by(layout: ParamLayout, degree: int, rank: int) -> bool:
    """Return whether ``rank`` saves the weight: it owns elements of it, or is the first and there are none."""
    if layout.alias_of:
        return False
    return bool(owned_blocks(layout, degree, rank)) or (rank == 0 and not math.prod(layout.rank_shape(degree)))


def duplicates(layout: ParamLayout, degree: int) -> list[Holding]:
    """Return rectangles in several places whose gradients are partial sums (replicated key/value heads).

    Empty for a fully replicated parameter: each rank computes the complete gradient.
    """
    if not any(plan.duplicated(degree) for plan in layout.axes):
        return []
    return [holding for holding in holdings(layout, degree) if len(holding.places) > 1]


@dataclass(frozen=True)
class Shard:
    """Elements ``start..stop`` of a rank's flattened tensor, with the runs of the complete tensor."""

    param: str
    tp_rank: int
    file: WeightSource
    layout: TensorLayout
    shape: tuple[int, ...]
    start: int
    stop: int
    logical: Mapping[str, tuple[int, ...]]
    """The parameter's logical tensors, with their full shapes."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """State of the piece that is not a tensor."""
    plans: ParamLayout | None = None
    """The parameter's sharding at any other degree, if the checkpoint records it."""
    dtype: str | None = None
    """For a piece of an optimizer's state: the dtype of what the optimizer updates, if the checkpoint records it."""

    @staticmethod
    def of(
        param: str,
        rank: int,
        file: WeightSource,
        layout: ParamLayout,
        degree: int,
        flat: tuple[int, int] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> Shard:
        """Return a rank's piece of a parameter: all of its tensor, or the range ``flat`` of its elements."""
        shape = layout.rank_shape(degree)
        start, stop = flat or (0, math.prod(shape))
        runs = layout.rank_layout(degree, rank)
        return Shard(param, rank, file, runs, shape, start, stop, layout.logical_shapes, values or {}, layout)

    def count(self, key: str) -> int:
        """Return the stored elements. Raises CheckpointError if they are not those of this piece."""
        shape = self.file.shape(key)
        if shape not in (self.shape, (self.stop - self.start,)):
            raise CheckpointError(
                f"rank {self.tp_rank}: {key!r} has the shape {shape}, expected {self.shape}: the shards are of another "
                "degree or another model"
            )
        return math.prod(shape)

    def read_into(self, out: Tensor, rectangle: Bounds, key: str) -> int:
        """Copy this piece's elements of a rectangle of the rank's tensor into ``out``; return how many."""
        count = 0
        if self.file.shape(key) == self.shape:
            out.copy_(self.file.read(key, slices_of(rectangle)))
            return out.numel()
        for part in flat_rectangles(self.shape, self.start, self.stop):
            both = overlap(part, rectangle)
            if both is None:
                continue
            # The part is contiguous, and narrowing its first dimension with several elements keeps it so.
            lead = 1 + next((dim for dim, (a, b) in enumerate(part) if b - a > 1), len(part) - 1)
            part = (*both[:lead], *part[lead:])
            sizes = [b - a for a, b in part]
            at = flat_index(part, self.shape) - self.start
            stored = self.file.read(key, [slice(at, at + math.prod(sizes))]).view(sizes)
            out[relative(both, rectangle)] = stored[relative(both, part)]
            count += math.prod(b - a for a, b in both)
        return count


class RunsSource:
    """The logical tensors that ``pieces`` hold under ``key`` ("" is the parameter itself)."""

    def __init__(self, pieces: Iterable[Shard], key: str = ""):
        self._key = key
        # Expert parallel ranks of one tensor parallel rank have different experts, and so different layouts.
        self._ranks: dict[str, dict[tuple[int, TensorLayout], list[Shard]]] = {}
        self._param_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._holdings: dict[str, list[Holding]] = {}
        for piece in pieces:
            self._ranks.setdefault(piece.param, {}).setdefault((piece.tp_rank, piece.layout), []).append(piece)
            for name, shape in piece.logical.items():
                self._param_of[name] = piece.param
                self._shapes[name] = shape

    def keys(self) -> list[str]:
        return list(self._param_of)

    def _find(self, name: str) -> str:
        try:
            return self._param_of[name]
        except KeyError:
            raise unknown_name(name, self._param_of, "the checkpoint") from None

    def shape(self, name: str) -> tuple[int, ...]:
        self._find(name)
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        param, ranks = self._find(name), self._held_by(name)
        owner = next((holding.owner for holding in self._holdings[param] if holding.name == name), 0)
        return ranks[owner][0].file.dtype(self._stored(param))

    def _held_by(self, name: str) -> list[list[Shard]]:
        """Return the pieces of the tensor's parameter by rank, after finding out which rank holds what."""
        param = self._find(name)
        ranks = list(self._ranks[param].values())
        if param not in self._holdings:
            self._holdings[param] = shared_holdings([pieces[0].layout for pieces in ranks])
        return ranks

    def _stored(self, param: str) -> str:
        return f"{param}|{self._key}" if self._key else param

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Return the logical tensor, or a slice of it. Raises CheckpointError if the files do not hold all of it."""
        param, ranks = self._find(name), self._held_by(name)
        shape, stored = self._shapes[name], self._stored(param)
        bounds = bounds_of(slices, shape)
        sizes = [stop - start for start, stop in bounds]
        parts = [
            (both, *holding.places[0], holding.logical)
            for holding in self._holdings[param]
            if holding.name == name and (both := overlap(holding.logical, bounds)) is not None
        ]
        held = sum(piece.count(stored) for rank in {part[1] for part in parts} for piece in ranks[rank])
        if held < math.prod(sizes):  # before memory of a size that only the record claims
            raise self._incomplete(name, held, math.prod(sizes))
        out = torch.empty(sizes, dtype=self.dtype(name))
        covered = 0
        for both, rank, local, logical in parts:
            rectangle = moved(both, logical, local)
            for piece in ranks[rank]:
                covered += piece.read_into(out[relative(both, bounds)], rectangle, stored)
        if covered != out.numel():
            raise self._incomplete(name, covered, out.numel())
        return out

    def _incomplete(self, name: str, held: int, expected: int) -> CheckpointError:
        return CheckpointError(
            f"{name!r}: the checkpoint holds {held} of the {expected} elements asked for, so it is damaged"
        )


class MergedSource(RunsSource):
    """The logical tensors of sharded weights, read in slices from the ranks that own them.

    ``ranks`` has one source (or state dict, or path) per rank, by parameter name; ``layouts`` is the table of
    :func:`weight_layout`. Together with :func:`iter_shards` it reshards to any degree, streaming.
    """

    def __init__(self, ranks: Sequence[Weights], layouts: Mapping[str, ParamLayout]):
        sources = [as_source(rank) for rank in ranks]
        super().__init__(
            Shard.of(param, rank, source, layout, len(sources))
            for param, layout in layouts.items()
            if not layout.alias_of
            for rank, source in enumerate(sources)
        )

    @property
    def names(self) -> list[str]:
        return self.keys()


def merge_state_dicts(
    rank_dicts: Sequence[Mapping[str, Tensor]], layouts: Mapping[str, ParamLayout]
) -> dict[str, Tensor]:
    """Merge the state dicts of all ranks, in rank order, into the logical one: no padding, duplicates taken once.

    A rank may lack tensors that it does not own. Raises CheckpointError if an owner lacks one or a shape does not fit.
    """
    merged = MergedSource([DictSource(rank) for rank in rank_dicts], layouts)
    return {name: merged.read(name) for name in merged.names}
