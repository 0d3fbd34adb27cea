"""Logical tensors from the ranks' files, read slice by slice through the runs, at any degrees.

:class:`RunsSource` is a weight source like any other: a model of another degree reads its slices from it, and tools
read full tensors one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nxd_infer.checkpoint.folder import WHILE_READ, Checkpoint, find_checkpoint, rank_stem
from nxd_infer.checkpoint.record import FIX, read_piece, read_record
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.unpack import unpack
from nxd_infer.layout.flat import Bounds, bounds_of, flat_index, flat_rectangles, moved, overlap, relative, slices_of
from nxd_infer.layout.merge import Holding, shared_holdings
from nxd_infer.layout.params import ParamLayout
from nxd_infer.layout.runs import TensorLayout
from nxd_infer.layout.sources import SafetensorsSource, Slices, WeightSource, WrappedSource, unknown_name
from nxd_infer.modules.lora.find import SUBFOLDER


@dataclass(frozen=True)
class Piece:
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
    values: Mapping[str, Any]
    """State of the piece that is not a tensor."""
    plans: ParamLayout | None = None
    """The parameter's sharding at any other degree, if the checkpoint records it."""
    dtype: str | None = None
    """For a piece of an optimizer's state: the dtype of what the optimizer updates, if the checkpoint records it."""

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

    def __init__(self, pieces: Iterable[Piece], key: str = ""):
        self._key = key
        self._ranks: dict[str, dict[int, list[Piece]]] = {}
        self._param_of: dict[str, str] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._holdings: dict[str, list[Holding]] = {}
        for piece in pieces:
            self._ranks.setdefault(piece.param, {}).setdefault(piece.tp_rank, []).append(piece)
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
        param = self._find(name)
        return next(iter(self._ranks[param].values()))[0].file.dtype(self._stored(param))

    def _stored(self, param: str) -> str:
        return f"{param}|{self._key}" if self._key else param

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        """Return the logical tensor, or a slice of it. Raises CheckpointError if the files do not hold all of it."""
        param = self._find(name)
        ranks = list(self._ranks[param].values())
        if param not in self._holdings:
            self._holdings[param] = shared_holdings([pieces[0].layout for pieces in ranks])
        shape, stored = self._shapes[name], self._stored(param)
        wanted = bounds_of(slices, shape)
        sizes = [stop - start for start, stop in wanted]
        parts = [
            (both, *holding.places[0], holding.logical)
            for holding in self._holdings[param]
            if holding.name == name and (both := overlap(holding.logical, wanted)) is not None
        ]
        held = sum(math.prod(piece.file.shape(stored)) for rank in {part[1] for part in parts} for piece in ranks[rank])
        if held < math.prod(sizes):  # before memory of a size that only the record claims
            raise self._incomplete(name, held, math.prod(sizes))
        out = torch.empty(sizes, dtype=self.dtype(name))
        covered = 0
        for both, rank, local, logical in parts:
            rectangle = moved(both, logical, local)
            for piece in ranks[rank]:
                covered += piece.read_into(out[relative(both, wanted)], rectangle, stored)
        if covered != out.numel():
            raise self._incomplete(name, covered, out.numel())
        return out

    def _incomplete(self, name: str, held: int, wanted: int) -> CheckpointError:
        return CheckpointError(
            f"{name!r}: the checkpoint holds {held} of the {wanted} elements asked for, so it is damaged"
        )


def adapter_of(source: WeightSource) -> tuple[list[str], bool]:
    """Return the names of a LoRA adapter's factors in a checkpoint, and whether the base weights are missing."""
    names = sorted(source.keys())
    factors = [name for name in names if ".lora_" in name]
    if not factors:
        return [], False
    layer, _, factor = factors[0].partition(".lora_")
    if factor.count(".") > 1:  # "A.q.weight": the base of a fused layer is named with q, k and v
        layer = layer.rpartition(".")[0]
    return factors, not any(name.startswith(f"{layer}." if layer else "") for name in set(names) - set(factors))


def require_no_adapter(source: WeightSource, where: str) -> None:
    """Raise CheckpointError if a LoRA adapter was saved, with or without the unmerged base weights."""
    factors, alone = adapter_of(source)
    if not factors:
        return
    fix = "save with LoraConfig(save_lora_base=True, merge_lora=True)"
    if alone:
        raise CheckpointError(
            f"{where} holds only a LoRA adapter ({factors[0]}, ...), not the weights of the model: serve "
            f"{where}/{SUBFOLDER} with --lora-slots, or {fix}"
        )
    raise CheckpointError(
        f"{where} holds a LoRA adapter beside the weights ({factors[0]}, ...), which are not merged: {fix}, or give "
        "the model itself to a trace"
    )


class _File(WrappedSource):
    """One of the checkpoint's safetensors files, opened (and fetched from a bucket) when first needed."""

    def __init__(self, checkpoint: Checkpoint, name: str, verify: Callable[[str], None] | None):
        self._checkpoint, self._name, self._verify = checkpoint, name, verify

    @cached_property
    def _source(self) -> SafetensorsSource:
        if self._verify is not None:
            self._verify(self._name)
        return SafetensorsSource(self._checkpoint.path(self._name))

    def open(self) -> None:
        """Open the file now, which its first tensor does."""
        for name in self.keys():
            self.shape(name)
            break


TRIES = 3
"""How often a checkpoint is read from its beginning because a save has replaced it meanwhile."""


def opened_whole(storage: Storage, tag: str | None, kinds: Collection[str]) -> Archive:
    """Find, open and verify a checkpoint; all that is read from it is of one save, even if another one replaces it.

    For one process; a job's ranks have to agree on what they read.
    """
    for _ in range(TRIES):
        found = find_checkpoint(storage, tag)
        try:
            archive = Archive(found)
            archive.verify(kinds)
            archive.open(kinds)
        except (CheckpointError, OSError):
            if not found.replaced():
                raise
            continue
        if not found.replaced():
            return archive
    raise CheckpointError(f"the checkpoint {found.where} {WHILE_READ}")


class Archive:
    """A checkpoint that is open for reading.

    The ranks' JSON files are always checked; :meth:`verify` checks their tensors. In a bucket, with ``verify``, a
    file is checked again when it is fetched by another rank than the one that checked it.
    """

    def __init__(self, checkpoint: Checkpoint, verify: bool = True):
        checkpoint.require_files()
        self.checkpoint = checkpoint
        self._verify = verify
        self._verified: set[str] = set()
        self._records: dict[int, dict[str, Any]] = {}
        self._files: dict[str, _File] = {}

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the job that saved it, by axis."""
        return self.checkpoint.degrees

    @property
    def where(self) -> str:
        """The name for messages."""
        return self.checkpoint.where

    def verify(self, kinds: Iterable[str], share: int = 0, of: int = 1) -> None:
        """Compare every ``of``-th of the files of ``kinds``, starting at ``share``, with its checksum.

        Each file is read once, by one rank, however many ranks read it later.
        Raises CheckpointError naming the file.
        """
        if self._verify:
            for name in self._names(kinds)[share::of]:
                self._verify_one(name)

    def _names(self, kinds: Iterable[str]) -> list[str]:
        return sorted({part["file"] for kind in kinds for _, part in self.parts(kind)})

    def _verify_one(self, name: str) -> None:
        if name not in self._verified:
            self.checkpoint.verify([name])
            self._verified.add(name)

    def open(self, kinds: Iterable[str]) -> None:
        """Open the files of ``kinds``, which are read then even if a save replaces them or removes their names.

        In a bucket they are fetched when they are read: it takes long, and each checkpoint has names of its own.
        """
        if self.checkpoint.storage.local:
            for name in self._names(kinds):
                self.file(name).open()

    def replaced(self) -> bool:
        """Whether a save has removed it, or put another one in its place, so that what was read may be of both."""
        return self.checkpoint.replaced()

    def record(self, rank: int) -> dict[str, Any]:
        """Return a rank's record of its files."""
        if rank not in self._records:
            name = f"{rank_stem(rank)}.json"
            self._records[rank] = read_record(self.checkpoint.read(name), f"{self.where}/{name}")
        return self._records[rank]

    def parts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield ``(rank, description)`` of the model or the optimizer, for the ranks that saved a part of it."""
        for rank in range(self.checkpoint.manifest["world_size"]):
            part = self.record(rank).get(kind)
            if part is not None:
                yield rank, part

    def pieces(self, kind: str) -> list[Piece]:
        """Return all pieces of the model or the optimizer. Raises CheckpointError if there are none."""
        found: list[Piece] = []
        saved = False
        for rank, part in self.parts(kind):
            saved = saved or "pieces" in part
            tp_rank = self.record(rank)["place"]["tp"]
            file, where = self.file(part["file"]), f"{self.where}/{rank_stem(rank)}.json"
            for name, piece in part.get("pieces", {}).items():
                found.append(Piece(name, tp_rank, file, **read_piece(name, piece, where)))
        if not saved:
            raise CheckpointError(f"{self.where} holds no {kind}, or not of a module; it was saved without")
        return found

    def adapter_files(self) -> list[str]:
        """Return the files of the LoRA adapter beside the weights, in PEFT's format."""
        return [name for name in self.checkpoint.manifest["files"] if name.startswith(f"{SUBFOLDER}/")]

    def file(self, name: str) -> _File:
        if name not in self._files:
            fetched = self._verify and not self.checkpoint.storage.local
            self._files[name] = _File(self.checkpoint, name, self._verify_one if fetched else None)
        return self._files[name]

    def value(self, rank: int, kind: str) -> Any:
        """Return what a rank saved without runs: ``"values"``, or a model or optimizer that was a dictionary."""
        where, part = f"{self.where}/{rank_stem(rank)}.json", self.record(rank).get(kind)
        if part is None:
            raise CheckpointError(f"{where} holds no {kind!r}; {FIX}")
        if "structure" not in part:
            raise CheckpointError(f"{where}: {kind!r}: it has no 'structure'; {FIX}")
        # Clone: a tensor of the mapped file would keep a removed checkpoint on the disk.
        found = unpack(part["structure"], lambda number: self.file(part["file"]).read(str(number)).clone())
        if kind == "values" and not (isinstance(found, dict) and (rank or "user_content" in found)):
            raise CheckpointError(f"{where}: {kind!r}: it has no 'user_content'; {FIX}")
        return found
