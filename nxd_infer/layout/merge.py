"""Merge the ranks' tensors into logical ones, and find out which rank holds what.

Each element is read from its *first owner*, the lowest rank that holds it, so it is enough if only owners save their
shards. ``holdings`` is the basis: every rectangle of every logical tensor with all places that hold it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.flat import Bounds, bounds_of, moved, overlap, relative, slices_of
from nxd_infer.layout.params import ParamLayout
from nxd_infer.layout.runs import AxisLayout, Block, Run, TensorLayout
from nxd_infer.layout.sources import DictSource, Slices, Weights, as_source, unknown_name


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
    cells: dict[tuple[str, Bounds], list[tuple[int, Bounds]]] = {}
    for rank, rank_layout in enumerate(ranks):
        axes = tuple(_split(axis, edges[dim]) for dim, axis in enumerate(rank_layout.axes))
        for name, logical, local in _cells(axes, rank_layout.source):
            cells.setdefault((name, logical), []).append((rank, local))
    return [Holding(name, logical, tuple(places)) for (name, logical), places in cells.items()]


Span = tuple[int, Run]


def _split(axis: AxisLayout, edges: Mapping[str, set[int]]) -> list[Span]:
    """Return the runs of an axis with their positions, split at every edge."""
    out: list[Span] = []
    at = 0
    for piece in axis:
        if isinstance(piece, Run):
            inside = sorted(edge for edge in edges[piece.name] if piece.start <= edge <= piece.stop)
            out += [(at + a - piece.start, Run(piece.name, a, b)) for a, b in itertools.pairwise(inside)]
        at += len(piece)
    return out


def _cells(axes: Sequence[list[Span]], source: str) -> Iterator[tuple[str, tuple, tuple]]:
    for spans in itertools.product(*axes):
        name = next((run.name for _, run in spans if run.name), source)
        yield (
            name,
            tuple((run.start, run.stop) for _, run in spans),
            tuple((at, at + len(run)) for at, run in spans),
        )


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


def sum_duplicates(rank_tensors: Sequence[Tensor], layout: ParamLayout) -> dict[str, Tensor]:
    """Merge the gradients of all ranks: sum duplicated rectangles, take replicated parameters once."""
    degree = len(rank_tensors)
    several = any(plan.duplicated(degree) for plan in layout.axes)
    out = {name: rank_tensors[0].new_zeros(shape) for name, shape in layout.logical_shapes.items()}
    for holding in holdings(layout, degree):
        for rank, local in holding.places if several else holding.places[:1]:
            out[holding.name][holding.logical_slices] += rank_tensors[rank][slices_of(local)]
    return out


class MergedSource:
    """The logical tensors of sharded weights, read in slices from the ranks that own them.

    ``ranks`` has one source (or state dict, or path) per rank, by parameter name; ``layouts`` is the table of
    :func:`weight_layout`. Together with :func:`iter_shards` it reshards to any degree, streaming.
    """

    def __init__(self, ranks: Sequence[Weights], layouts: Mapping[str, ParamLayout]):
        self._ranks = [as_source(rank) for rank in ranks]
        self._params: dict[str, tuple[str, ParamLayout]] = {}
        self._holdings: dict[str, list[Holding]] = {}
        for param, layout in layouts.items():
            if not layout.alias_of:
                self._params.update(dict.fromkeys(layout.logical_names, (param, layout)))

    @property
    def names(self) -> list[str]:
        return list(self._params)

    def keys(self) -> list[str]:
        return self.names

    def _find(self, name: str) -> tuple[str, ParamLayout]:
        try:
            return self._params[name]
        except KeyError:
            raise unknown_name(name, self._params) from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].logical_shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        param = self._find(name)[0]
        owner = self._of(name)[0].owner if self._of(name) else 0
        return self._ranks[owner].dtype(param)

    def _of(self, name: str) -> list[Holding]:
        param, layout = self._find(name)
        if param not in self._holdings:
            self._holdings[param] = holdings(layout, len(self._ranks))
        return [holding for holding in self._holdings[param] if holding.name == name]

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Read the logical tensor, or a slice of it. Raises CheckpointError if a shard is missing or misshapen."""
        param, layout = self._find(name)
        shape, wanted = self.shape(name), layout.rank_shape(len(self._ranks))
        bounds = bounds_of(slices, shape)
        out = torch.empty([stop - start for start, stop in bounds], dtype=self.dtype(name))
        covered = 0
        for holding in self._of(name):
            both = overlap(holding.logical, bounds)
            if both is None:
                continue
            rank, local = holding.places[0]
            if self._ranks[rank].shape(param) != wanted:
                raise CheckpointError(
                    f"rank {rank} of {len(self._ranks)}: {param!r} has the shape {self._ranks[rank].shape(param)}, "
                    f"expected {wanted}: the shards are of another degree or another model"
                )
            write = relative(both, bounds)
            out[write] = self._ranks[rank].read(param, slices_of(moved(both, holding.logical, local)))
            covered += out[write].numel()
        if covered != out.numel():
            raise CheckpointError(f"{name!r}: the ranks hold only {covered} of the {out.numel()} requested elements")
        return out


def merge_state_dicts(
    rank_dicts: Sequence[Mapping[str, Tensor]], layouts: Mapping[str, ParamLayout]
) -> dict[str, Tensor]:
    """Merge the state dicts of all ranks, in rank order, into the logical one: no padding, duplicates taken once.

    A rank may lack tensors that it does not own. Raises CheckpointError if an owner lacks one or a shape does not fit.
    """
    merged = MergedSource([DictSource(rank) for rank in rank_dicts], layouts)
    return {name: merged.read(name) for name in merged.names}
