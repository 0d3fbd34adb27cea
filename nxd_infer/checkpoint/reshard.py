"""Rewrite a checkpoint for other degrees, optimizer included: in one process, with one tensor in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer.checkpoint import folder as folders
from nxd_infer.checkpoint.archive import Archive
from nxd_infer.checkpoint.folder import model_file, rank_stem
from nxd_infer.checkpoint.load import OF_RANKS, of_this_rank
from nxd_infer.checkpoint.load_optimizer import classify, groups_of, read_flat
from nxd_infer.checkpoint.neuronx.archive import AnyArchive
from nxd_infer.checkpoint.open import PathLike, open_archive
from nxd_infer.checkpoint.save import wait_for_ranks, write_rank
from nxd_infer.checkpoint.stages_by_name import stages_of
from nxd_infer.checkpoint.storage import LocalStorage, Storage, storage_of
from nxd_infer.context import AXES, ParallelContext, make_context
from nxd_infer.errors import CheckpointError, ParallelConfigError
from nxd_infer.layout import ParamLayout, TensorLayout, shard_tensor
from nxd_infer.layout.describe import describe_piece
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.layout.files.one_rank import storable
from nxd_infer.layout.files.stream import write_safetensors
from nxd_infer.layout.files.values import pack
from nxd_infer.layout.merge import RunsSource, Shard, is_saved_by
from nxd_infer.modules.lora.find import SUBFOLDER
from nxd_infer.optimizer.sharded_files import FORMAT, NAMES, stem
from nxd_infer.util.options import whole_number
from nxd_infer.util.progress import Progress, counted, silent

MOST_RANKS = 4096
"""Along an axis; each has files of its own."""

Read = Callable[[], Tensor]


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
    work = Resharding(archive, tp, dp, pp, cuts)
    name = archive.checkpoint.tag if isinstance(archive, Archive) else Path(archive.where).name
    work.write(storage, name, counted(progress, f"writing {storage.where()}", work.steps))
    degrees = {"tp": work.tp, "pp": work.pp, "dp": work.dp}
    return Resharded(storage.where(name), work.steps, dict(archive.degrees), degrees, tuple(work.notes))


@dataclass
class Part:
    """One rank's part of a model or an optimizer: the tensors, each read when it is written, and the record."""

    file: str
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, Read]] = field(default_factory=dict)
    pieces: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


class Resharding:
    """A checkpoint resharded for ``tp`` x ``pp`` x ``dp`` ranks; ``dp`` None keeps the degree.

    ``cuts``: see :func:`~nxd_infer.checkpoint.stages_by_name.stages_of`.
    """

    def __init__(
        self,
        archive: AnyArchive,
        tp: int,
        dp: int | None = None,
        pp: int = 1,
        cuts: Sequence[str] | None = None,
    ):
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
        self._weights = RunsSource(self._model)
        self._group_names = groups_of(archive, []).get(NAMES, []) if self._optimizer else []
        elementwise, self._single = classify(self._optimizer)
        self._moments = {key: RunsSource(pieces, key) for key, pieces in elementwise.items()}
        self._stages = self._stages_of_weights(cuts)
        self._groups = [self._groups_of(stage) for stage in range(pp)] if self._optimizer else []
        self._parts = [self._parts_of(context) for context in self.contexts]
        self.steps = sum(len(part.tensors) for parts in self._parts for part in parts.values())
        """Tensors to write."""

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

    def _here(self, pieces: list[Shard], context: ParallelContext) -> dict[str, ParamLayout]:
        """Return how each parameter of this rank's stage is sharded."""
        plans = _plans(pieces, self.archive)
        return {name: one for name, one in plans.items() if self._stages[name] == context.pp.rank}

    # --- what each rank gets --------------------------------------------------------------------------

    def _parts_of(self, context: ParallelContext) -> dict[str, Part]:
        parts = {}
        if self._model and context.dp.rank == 0:
            parts["model"] = self._model_part(context)
        sharded = self._is_zero1()
        if self._optimizer and (sharded or context.dp.rank == 0):
            parts["optimizer"] = self._optimizer_part(context, sharded)
        return parts

    def _is_zero1(self) -> bool:
        return isinstance(self.archive, Archive) and any(
            self.archive.record(rank)["place"]["dp"] > 0 for rank, _ in self.archive.parts("optimizer")
        )

    def _model_part(self, context: ParallelContext) -> Part:
        part = Part(model_file(context))
        source = self._weights
        for name, plans in self._here(self._model, context).items():
            if not is_saved_by(plans, self.tp, context.tp.rank):
                continue
            shape = plans.rank_shape(self.tp)
            layout = plans.rank_layout(self.tp, context.tp.rank)
            dtype = source.dtype(plans.logical_names[0])
            part.tensors[name] = shape, dtype, partial(shard_tensor, source, layout, dtype)
            part.pieces[name] = describe_piece(plans, self.tp, context.tp.rank, shape, 0, math.prod(shape))
        return part

    def _optimizer_part(self, context: ParallelContext, sharded: bool) -> Part:
        part = Part(f"{stem(context)}.safetensors")
        first_of = {piece.param: piece for piece in reversed(self._optimizer)}
        for name, plans in self._here(self._optimizer, context).items():
            shape = plans.rank_shape(self.tp)
            numel = math.prod(shape)
            share, place = (-(-numel // self.dp), context.dp.rank) if sharded else (numel, 0)
            start, stop = min(place * share, numel), min((place + 1) * share, numel)
            if start >= stop and (numel or place):  # a job saves a parameter without elements, too, once
                continue
            layout = plans.rank_layout(self.tp, context.tp.rank)
            stored = (stop - start,) if sharded else shape
            for key, source in self._moments.items():
                if not set(plans.logical_names) <= set(source.keys()):
                    continue
                dtype = source.dtype(plans.logical_names[0])

                read = partial(_read_range, source, layout, shape, (start, stop), stored, dtype)
                part.tensors[f"{name}|{key}"] = stored, dtype, read
            first = first_of[name]
            for key in self._single.get(id(first), ()):
                value = first.file.read(f"{name}|{key}")
                if value.numel() > 1:
                    raise CheckpointError(
                        f"the optimizer's {key!r} of {name!r} has the shape {list(value.shape)}, not its parameter's: "
                        "it fits only the degrees that it was saved at"
                    )
                part.tensors[f"{name}|{key}"] = tuple(value.shape), value.dtype, lambda value=value: value
            part.pieces[name] = {
                **describe_piece(plans, self.tp, context.tp.rank, shape, start, stop),
                "values": dict(first.values),
                **({} if first.dtype is None else {"dtype": first.dtype}),
            }
        degrees = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        part.record = {"format": FORMAT, "degrees": degrees, **self._groups[context.pp.rank]}
        return part

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

    # --- writing --------------------------------------------------------------------------------------

    def write(self, storage: Storage, tag: str, advance: Callable[[], None]) -> None:
        """Write the checkpoint ``tag``, completely or not at all; ``advance`` is called after each tensor."""
        tag = folders.checked_tag(tag)
        if any(found.tag == tag for found in folders.complete_checkpoints(storage)):
            raise CheckpointError(f"{storage.where()} already holds a checkpoint {tag!r}; choose another folder")
        counter = folders.begin(storage, tag)
        folder = folders.folder_of(storage, tag, counter)
        try:
            for context, parts in zip(self.contexts, self._parts, strict=True):
                self._write_rank(storage, folder, context, parts, advance)
            facts = {
                "world_size": len(self.contexts),
                "degrees": {axis: self.contexts[0].axis(axis).degree for axis in AXES},
                "torch": str(torch.__version__),
                "resharded_from": dict(self.archive.degrees),
            }
            folders.finish(storage, tag, counter, facts, wait_for_ranks(storage, folder, len(self.contexts)), None)
        except BaseException:
            folders.abandon(storage, tag, counter)
            raise

    def _write_rank(
        self,
        storage: Storage,
        folder: str,
        context: ParallelContext,
        parts: Mapping[str, Part],
        advance: Callable[[], None],
    ) -> None:
        values = f"{rank_stem(context.rank)}.safetensors"
        structure, tensors = pack(self._values(context))
        record: dict[str, Any] = {
            "place": {axis: context.axis(axis).rank for axis in AXES},
            **{kind: {"file": part.file, "pieces": part.pieces, **part.record} for kind, part in parts.items()},
            "values": {"file": values, "structure": structure},
        }

        def write(place: Path) -> Iterator[str]:
            for part in parts.values():
                _write_part(place / part.file, part, advance)
                yield part.file
            with replacing(place / values) as temporary:
                save_file(storable(tensors), temporary)
            yield values
            if context.rank == 0:
                yield from self._copy_adapter(place)

        write_rank(storage, folder, context.rank, record, write)

    def _copy_adapter(self, place: Path) -> Iterator[str]:
        """Copy the checkpoint's LoRA adapter, which is the same at any degrees."""
        if not isinstance(self.archive, Archive):
            return
        for name in self.archive.adapter_files():
            (place / SUBFOLDER).mkdir(exist_ok=True)
            (place / name).write_bytes(self.archive.checkpoint.read(name))
            yield name


def _write_part(path: Path, part: Part, advance: Callable[[], None]) -> None:
    entries = [(name, dtype, shape) for name, (shape, dtype, _) in part.tensors.items()]

    def tensor(name: str) -> Tensor:
        advance()
        return part.tensors[name][2]()

    with replacing(path) as temporary, open(temporary, "wb") as file:
        write_safetensors(file, entries, tensor)


def _read_range(
    source: RunsSource,
    layout: TensorLayout,
    shape: tuple[int, ...],
    bounds: tuple[int, int],
    stored: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    out = torch.zeros(bounds[1] - bounds[0], dtype=dtype)
    read_flat(out, source, layout, shape, *bounds)
    return out.view(stored)


def _plans(pieces: list[Shard], archive: AnyArchive) -> dict[str, ParamLayout]:
    """Return how each parameter is sharded at any degree. Raises CheckpointError if the checkpoint does not say."""
    found: dict[str, ParamLayout] = {}
    for piece in pieces:
        if piece.plans is None:
            raise CheckpointError(
                f"{archive.where} does not say how {piece.param!r} is sharded at other degrees, which a custom plan "
                "decides: load it in a job at the new degrees and save it there"
            )
        found.setdefault(piece.param, piece.plans)
    return found
