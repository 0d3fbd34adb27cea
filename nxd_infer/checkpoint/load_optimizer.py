"""Read an optimizer's state from a checkpoint of any degrees, with or without ZeRO-1."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from nxd_infer.checkpoint.neuronx.archive import AnyArchive
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import DictSource, TensorLayout, check_weights
from nxd_infer.layout.flat import flat_index, flat_rectangles, moved, overlap, relative, slices_of
from nxd_infer.layout.merge import RunsSource, Shard
from nxd_infer.layout.shard import write_fills
from nxd_infer.optimizer import pieces as optimizer_pieces
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.optimizer.sharded_files import GROUPS, MASTER, NAMES, require_same_groups


def read_optimizer(
    optimizer: NxDOptimizer, archive: AnyArchive, context: ParallelContext
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state of the elements in each piece of ``optimizer``, for :func:`take_over`.

    State with its parameter's shape is read element by element; a single number per parameter (``step``) is the same
    for all elements. Any other state can only be read at the degrees of the save.

    Raises WeightMismatchError for an optimizer of other parameters.
    """
    stored = archive.pieces("optimizer")
    layouts = optimizer.layouts
    shapes = {name: torch.empty(shape, device="meta") for piece in stored for name, shape in piece.logical.items()}
    others = optimizer.logical_elsewhere
    # Sharded ZeRO-1 gives a parameter without elements to no rank.
    unsaved = {
        name
        for name, layout in layouts.items()
        if not any(map(math.prod, layout.logical_shapes.values())) and shapes.keys().isdisjoint(layout.logical_names)
    }
    expected = {name: layout for name, layout in layouts.items() if name not in unsaved}
    check_weights(expected, DictSource({name: shape for name, shape in shapes.items() if name not in others}))
    state = StoredState(stored, archive)
    first_of = {name: piece for piece in reversed(stored) for name in piece.logical}
    same_degrees = archive.degrees["tp"] == context.tp.degree
    same = {(p.param, p.tp_rank, p.layout, p.start, p.stop): p for p in stored if same_degrees}
    tensors: dict[str, Tensor] = {}
    values = {}
    for piece in optimizer.pieces:
        name = optimizer.names[piece.index]
        if name in unsaved:
            values[name] = {"values": {}}
            continue
        layout = layouts[name].rank_layout(context.tp.degree, context.tp.rank)
        logical = layouts[name].logical_names
        for key, source, dtype in state.moments(logical):
            tensors[f"{name}|{key}"] = _read(source, key, piece, layout, dtype)
        equal = same.get((name, context.tp.rank, layout, piece.start, piece.stop))
        like = equal or first_of[logical[0]]
        values[name] = {"values": like.values, "dtype": like.dtype}
        for key, found in state.others(like, anywhere=equal is None):
            tensors[f"{name}|{key}"] = found.clone()  # without the mapping of its file
    # Compared by logical names: of a fused layer, the same weights are one parameter or several.
    logical_of = {piece.param: list(piece.logical) for piece in stored}
    own = [[one for name in names for one in layouts[name].logical_names] for names in optimizer.group_names]
    description = {"pieces": values, **groups_of(archive, own, logical_of)}
    whole = [[*names, *others] for names, others in zip(own, optimizer.logical_groups_elsewhere, strict=True)]
    require_same_groups(optimizer, description, archive.where, whole)
    return tensors, description


def groups_of(
    archive: AnyArchive, own: Sequence[Sequence[str]], logical_of: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the hyperparameters of each group, and the names of its parameters: those of all pipeline stages together.

    Stages may differ in their hyperparameters and in how many groups they have: both are of the stages that saved what
    a rank trains, ``own`` by group. ``logical_of``: the names to use instead of the stored ones.
    """
    parts = [part for _, part in archive.parts("optimizer")]
    if not all(NAMES in part for part in parts):  # from the reference
        return {GROUPS: parts[0][GROUPS]}
    stages = []
    for part in parts:
        names = ([one for name in group for one in logical_of.get(name, [name])] for group in part[NAMES])
        stages.append(list(zip(part[GROUPS], names, strict=False)))
    mine = [set(names) for names in own]
    near = [stage for stage in stages if any(ours & set(names) for ours, (_, names) in zip(mine, stage, strict=False))]
    found: dict[str, Any] = {GROUPS: [], NAMES: []}
    for n in range(max(map(len, near or stages))):
        ours = mine[n] if n < len(mine) else set()
        saved = [stage[n] for stage in near or stages if n < len(stage)]
        found[GROUPS].append(next((group for group, names in saved if ours & set(names)), saved[0][0]))
        together = {name: None for stage in stages if n < len(stage) for name in stage[n][1]}
        found[NAMES].append(list(together))
    return found


class StoredState:
    """The state of a checkpoint's optimizer, by keys that hold one value for each element of a parameter, and others.

    One value of a piece of one element may be either: it is what the key is in other pieces.
    """

    def __init__(self, stored: list[Shard], archive: AnyArchive):
        self._archive = archive
        keys_of: dict[int, dict[str, list[str]]] = {}
        for file in {id(piece.file): piece.file for piece in stored}.values():
            by_param = keys_of[id(file)] = {}
            for full in file.keys():  # noqa: SIM118  (a source is not a mapping)
                param, _, key = full.rpartition("|")
                by_param.setdefault(param, []).append(key)
        entries: list[tuple[Shard, str, bool]] = []
        for piece in stored:
            for key in keys_of[id(piece.file)].get(piece.param, ()):
                shape = piece.file.shape(f"{piece.param}|{key}")
                entries.append((piece, key, shape in (piece.shape, (piece.stop - piece.start,))))
        single = {key for _, key, fits in entries if not fits}
        single -= {key for piece, key, fits in entries if fits and piece.stop - piece.start > 1}
        elementwise: dict[str, list[Shard]] = {}
        self._others: dict[int, list[str]] = {}
        for piece, key, fits in entries:
            if fits and (key not in single or piece.stop == piece.start):
                elementwise.setdefault(key, []).append(piece)
            else:
                self._others.setdefault(id(piece), []).append(key)
        self.sources = {key: RunsSource(pieces, key) for key, pieces in elementwise.items()}
        """By key, for the logical tensors."""
        self._names = {key: set(source.keys()) for key, source in self.sources.items()}

    def moments(self, logical: Sequence[str]) -> list[tuple[str, RunsSource, torch.dtype]]:
        """Return key, source and dtype of what there is for each element of a parameter's logical tensors."""
        keys = [key for key, names in self._names.items() if names.issuperset(logical)]  # not only padding
        return [(key, self.sources[key], self.sources[key].dtype(logical[0])) for key in keys]

    def others(self, piece: Shard, anywhere: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the rest of a piece's state. Raises CheckpointError for what ``anywhere`` but in this piece has no
        meaning."""
        for key in self._others.get(id(piece), ()):
            found = piece.file.read(f"{piece.param}|{key}")
            if found.numel() > 1 and anywhere:
                raise CheckpointError(
                    f"the optimizer's {key!r} of {piece.param!r} has the shape {list(found.shape)}, not its "
                    f"parameter's: it can be loaded at the degrees it was saved at only, which are "
                    f"{dict(self._archive.degrees)}"
                )
            yield key, found


def _read(
    source: RunsSource, key: str, piece: optimizer_pieces.Piece, layout: TensorLayout, dtype: torch.dtype
) -> Tensor:
    """Return the state of a piece; padding of a parameter has never been updated."""
    if key == MASTER:  # before its weights are loaded, the parameter may hold other values there
        whole = torch.zeros(layout.shape, dtype=piece.param.dtype)
        write_fills(whole, layout)
        out = whole.reshape(-1)[piece.start : piece.stop].to(dtype, copy=True)
    else:
        out = torch.zeros(piece.stop - piece.start, dtype=dtype)
    read_flat(out, source, layout, tuple(piece.param.shape), piece.start, piece.stop)
    return out.view(piece.tensor.shape)


def read_flat(
    out: Tensor, source: RunsSource, layout: TensorLayout, shape: tuple[int, ...], start: int, stop: int
) -> None:
    """Read elements ``start..stop`` of a rank's flattened tensor into ``out`` [stop - start], except padding."""
    for part in flat_rectangles(shape, start, stop):
        sizes = [b - a for a, b in part]
        at = flat_index(part, shape) - start
        here = out[at : at + math.prod(sizes)].view(sizes)
        for block in layout.blocks():
            both = overlap(block.local, part)
            if both is not None:
                logical = moved(both, block.local, block.logical)
                here[relative(both, part)] = source.read(block.name, slices_of(logical))
