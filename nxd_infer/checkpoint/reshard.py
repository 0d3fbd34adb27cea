"""Rewrite a checkpoint for other degrees, optimizer included: in one process, with one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.checkpoint import folder as folders
from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.contents import Content, Unread
from nxd_infer.checkpoint.folder import model_file, rank_stem
from nxd_infer.checkpoint.load import OF_RANKS, of_this_rank
from nxd_infer.checkpoint.load_optimizer import StoredState, groups_of, read_flat
from nxd_infer.checkpoint.neuronx.archive import AnyArchive
from nxd_infer.checkpoint.open import PathLike, open_archive
from nxd_infer.checkpoint.save import wait_for_ranks, write_content
from nxd_infer.checkpoint.stages_by_name import stages_of
from nxd_infer.checkpoint.storage import LocalStorage, storage_of
from nxd_infer.context import AXES, ParallelContext, make_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.layout import ParamLayout, TensorLayout, shard_tensor
from nxd_infer.layout.describe import describe_piece
from nxd_infer.layout.files.one_rank import storable
from nxd_infer.layout.files.values import pack
from nxd_infer.layout.merge import RunsSource, Shard, is_saved_by
from nxd_infer.optimizer.sharded_files import FORMAT, NAMES, stem
from nxd_infer.util.options import whole_number
from nxd_infer.util.progress import Progress, counted, silent

MOST_RANKS = 4096
"""Along an axis; each has files of its own."""


@dataclass(frozen=True)
class Resharded:
    """The result of :func:`reshard_checkpoint`."""

    where: str
    tensors: int
    """Number of tensors written."""
    before: dict[str, int]
    """The degrees of the checkpoint that was read, by axis."""
    degrees: dict[str, int]
    """Those of the new one."""
    notes: tuple[str, ...]
    """What was left out and why; a sentence each."""


def reshard_checkpoint(
    path: PathLike,
    out: PathLike,
    *,
    tp: int,
    dp: int | None = None,
    pp: int = 1,
    cuts: Sequence[str] | None = None,
    tag: str | None = None,
    config: PathLike | None = None,
    rules: PathLike | None = None,
    progress: Progress = silent,
) -> Resharded:
    """Write a checkpoint into the folder ``out`` as a job of other degrees would have saved it, all or nothing.

    Args:
        path, tag, config, rules: the checkpoint; see :func:`~nxd_infer.checkpoint.open.open_archive`.
        out: another folder of checkpoints, or the URL of one.
        tp, dp, pp: the new degrees. ``dp`` None: unchanged.
        cuts: the last layers of all pipeline stages but the last. Default: balanced by the size of the matrices.
        progress: called as ``progress(stage, done, total)``, a step for each tensor.

    Raises CheckpointError if the checkpoint does not fit other degrees or ``out`` already has one of its tag, and
    ParallelConfigError for a degree below 1 or above :data:`MOST_RANKS`, or cuts that are not layers.
    """
    for axis, degree in (("tp", tp), ("pp", pp), *([] if dp is None else [("dp", dp)])):
        whole_number(axis, degree, ParallelConfigError, 1, MOST_RANKS)
    archive = open_archive(path, tag, config=config, rules=rules)
    storage = storage_of(out)
    if isinstance(storage, LocalStorage):
        root, taken = storage.root.resolve(), Path(archive.where).resolve()
        if root == Path(path).resolve() or root.is_relative_to(taken):
            raise CheckpointError(f"{out} is the folder of the checkpoint itself; write to another one")
    tag = folders.checked_tag(archive.checkpoint.tag if isinstance(archive, Archive) else Path(archive.where).name)
    work = Resharding(archive, tp, dp, pp, cuts)
    if any(one.tag == tag for one in folders.complete_checkpoints(storage)):
        raise CheckpointError(f"{storage.where()} already holds a checkpoint {tag!r}; choose another folder")
    advance = counted(progress, f"writing {storage.where()}", work.steps)
    counter = folders.begin(storage, tag)
    folder = folders.folder_of(storage, tag, counter)
    try:
        for context, content in zip(work.contexts, work.contents, strict=True):
            write_content(storage, folder, context.rank, content, advance)
        checksums = wait_for_ranks(storage, folder, len(work.contexts))
        folders.finish(storage, tag, counter, work.contexts[0], checksums, resharded_from=dict(archive.degrees))
    except BaseException:
        folders.abandon(storage, tag, counter)
        raise
    degrees = {"tp": tp, "pp": pp, "dp": work.dp}
    return Resharded(storage.where(tag), work.steps, dict(archive.degrees), degrees, tuple(work.notes))


class Resharding:
    """What each of ``tp`` x ``pp`` x ``dp`` ranks would have saved of a checkpoint; ``dp`` None keeps the degree.

    ``cuts``: see :func:`~nxd_infer.checkpoint.stages_by_name.stages_of`.
    """

    def __init__(self, archive: AnyArchive, tp: int, dp: int | None, pp: int, cuts: Sequence[str] | None):
        self.archive = archive
        self.tp, self.pp, self.dp = tp, pp, archive.degrees["dp"] if dp is None else dp
        self.notes: list[str] = []
        """What was left out, for the user."""
        world = self.tp * self.pp * self.dp
        self.contexts = [make_context(world, rank, tp=tp, pp=pp) for rank in range(world)]
        for kind in ("model", "optimizer"):
            if any("structure" in part for _, part in archive.parts(kind)):
                raise CheckpointError(
                    f"the {kind} of {archive.where} was saved as a dictionary, which fits only its own degrees: save "
                    "the object itself"
                )
        self._model = archive.pieces("model") if any(archive.parts("model")) else []
        self._optimizer = self._optimizer_pieces()
        self._plans = {piece.param: _plans_of(piece, archive) for piece in [*self._optimizer, *self._model]}
        self._weights = RunsSource(self._model)
        self._group_names = groups_of(archive, []).get(NAMES, []) if self._optimizer else []
        self._state = StoredState(self._optimizer, archive)
        self._stages = self._stages_of_weights(cuts)
        self._groups = [self._groups_of(stage) for stage in range(pp)] if self._optimizer else []
        self.contents = [self._content(context) for context in self.contexts]
        read = (one for content in self.contents for tensors in content.files.values() for one in tensors.values())
        self.steps = sum(isinstance(one, Unread) for one in read)
        """Tensors of the model and the optimizer to write."""

    def _optimizer_pieces(self) -> list[Shard]:
        if not any(self.archive.parts("optimizer")):
            return []
        if isinstance(self.archive, Archive):
            return self.archive.pieces("optimizer")
        self.notes.append(
            "the optimizer's state is left out: the reference's files number the parameters instead of naming them. "
            "Load the checkpoint in a job with load_checkpoint(), which knows the names, and save it there"
        )
        return []

    def _stages_of_weights(self, cuts: Sequence[str] | None) -> dict[str, int]:
        """Return the stage of each parameter and buffer."""
        pieces = {piece.param: piece for piece in reversed([*self._model, *self._optimizer])}
        if self.pp == 1 and not cuts:
            return dict.fromkeys(pieces, 0)
        # From the first pieces to the last: a model that was saved at once is in its own order.
        names = dict.fromkeys(piece.param for piece in (*self._model, *self._optimizer))
        costs = {
            name: sum(math.prod(shape) for shape in pieces[name].logical.values() if len(shape) > 1) for name in names
        }
        return stages_of(costs, self.pp, cuts)

    # --- what each rank gets --------------------------------------------------------------------------

    def _content(self, context: ParallelContext) -> Content:
        content = Content({}, {"place": {axis: context.axis(axis).rank for axis in AXES}})
        if self._model and context.dp.rank == 0:
            name = model_file(context)
            content.files[name], pieces = self._model_part(context)
            content.record["model"] = {"file": name, "pieces": pieces}
        sharded = self._is_zero1()
        if self._optimizer and (sharded or context.dp.rank == 0):
            name = f"{stem(context)}.safetensors"
            degrees = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
            content.files[name], pieces = self._optimizer_part(context, sharded)
            groups = self._groups[context.pp.rank]
            content.record["optimizer"] = {
                "file": name,
                "pieces": pieces,
                "format": FORMAT,
                "degrees": degrees,
                **groups,
            }
        name = f"{rank_stem(context.rank)}.safetensors"
        structure, values = pack(self._values(context))
        content.files[name] = storable(values)
        content.record["values"] = {"file": name, "structure": structure}
        if context.rank == 0 and isinstance(self.archive, Archive) and self.archive.adapter_files():
            content.write_adapter = self.archive.copy_adapter
        return content

    def _is_zero1(self) -> bool:
        return isinstance(self.archive, Archive) and any(
            self.archive.record(rank)["place"]["dp"] > 0 for rank, _ in self.archive.parts("optimizer")
        )

    def _here(self, pieces: list[Shard], context: ParallelContext) -> list[tuple[str, ParamLayout, TensorLayout]]:
        """Return name, layout at any degree and layout on this rank of each parameter of its stage."""
        names = dict.fromkeys(piece.param for piece in pieces if self._stages[piece.param] == context.pp.rank)
        return [(name, self._plans[name], self._plans[name].rank_layout(self.tp, context.tp.rank)) for name in names]

    def _model_part(self, context: ParallelContext) -> tuple[dict[str, Unread], dict[str, Any]]:
        tensors, pieces, source = {}, {}, self._weights
        for name, plans, layout in self._here(self._model, context):
            if is_saved_by(plans, self.tp, context.tp.rank):
                dtype = source.dtype(plans.logical_names[0])
                tensors[name] = Unread(layout.shape, dtype, partial(shard_tensor, source, layout, dtype))
                pieces[name] = describe_piece(plans, self.tp, context.tp.rank, layout.shape, 0, math.prod(layout.shape))
        return tensors, pieces

    def _optimizer_part(
        self, context: ParallelContext, sharded: bool
    ) -> tuple[dict[str, Tensor | Unread], dict[str, Any]]:
        tensors: dict[str, Tensor | Unread] = {}
        pieces: dict[str, Any] = {}
        first_of = {piece.param: piece for piece in reversed(self._optimizer)}
        for name, plans, layout in self._here(self._optimizer, context):
            numel = math.prod(layout.shape)
            share, place = (-(-numel // self.dp), context.dp.rank) if sharded else (numel, 0)
            start, stop = min(place * share, numel), min((place + 1) * share, numel)
            if start >= stop and (numel or place):  # a job saves a parameter without elements, too, once
                continue
            shape = (stop - start,) if sharded else layout.shape
            for key, source, dtype in self._state.moments(plans.logical_names):
                tensors[f"{name}|{key}"] = Unread(
                    shape, dtype, partial(_read_range, source, layout, start, shape, dtype)
                )
            first = first_of[name]
            for key, value in self._state.others(first, anywhere=True):
                tensors[f"{name}|{key}"] = Unread(tuple(value.shape), value.dtype, lambda value=value: value)
            pieces[name] = {
                **describe_piece(plans, self.tp, context.tp.rank, layout.shape, start, stop),
                "values": dict(first.values),
                **({} if first.dtype is None else {"dtype": first.dtype}),
            }
        return tensors, pieces

    def _groups_of(self, stage: int) -> dict[str, Any]:
        """Return the parameter groups that the ranks of a stage record."""
        # Sharded, a parameter without elements is in no file; the names of all stages count together.
        own = [[name for name in names if self._stages.get(name, 0) == stage] for names in self._group_names]
        groups = groups_of(self.archive, own)
        if NAMES in groups:
            groups[NAMES] = own[: len(groups[NAMES])]
        return groups

    def _values(self, context: ParallelContext) -> dict[str, Any]:
        """Return the random state if the degrees stay, the position in the data if possible, and on rank 0 the rest."""
        first = self.archive.value(0, "values")
        same = all(self.archive.degrees[axis] == context.axis(axis).degree for axis in AXES)
        own = dict(self.archive.value(context.rank, "values")) if same else {}
        for key in OF_RANKS:
            if key not in first or same:
                continue
            try:
                own[key] = of_this_rank(self.archive, context, key)
            except CheckpointError as error:
                if context.rank == 0:
                    self.notes.append(f"{key} is left out: {error}")
        if context.rank == 0:
            own |= {key: item for key, item in first.items() if key not in ("random", *OF_RANKS)}
        return own


def _read_range(
    source: RunsSource, layout: TensorLayout, start: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return elements of a rank's flattened tensor, from ``start`` on, as a tensor of ``shape``."""
    out = torch.zeros(shape, dtype=dtype)
    read_flat(out.view(-1), source, layout, layout.shape, start, start + out.numel())
    return out


def _plans_of(piece: Shard, archive: AnyArchive) -> ParamLayout:
    """Return how a parameter is sharded at any degree. Raises CheckpointError if the checkpoint does not say."""
    if piece.plans is None:
        raise CheckpointError(
            f"{archive.where} does not say how {piece.param!r} is sharded at other degrees, which a custom plan "
            "decides: load it in a job at the new degrees and save it there"
        )
    return piece.plans
