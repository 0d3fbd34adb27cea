"""One checkpoint, open for reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from nxd_infer.checkpoint.folder import WHILE_READ, Checkpoint, find_checkpoint, rank_stem
from nxd_infer.checkpoint.storage import Storage
from nxd_infer.errors import CheckpointError, ShardingError
from nxd_infer.layout.describe import read_plans
from nxd_infer.layout.files.values import unpack
from nxd_infer.layout.merge import Shard
from nxd_infer.layout.runs import TensorLayout
from nxd_infer.layout.sources import SafetensorsSource, WeightSource, WrappedSource
from nxd_infer.modules.lora.find import SUBFOLDER
from nxd_infer.util.reading import parse_json


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
    merged = Path(where).parent.parent / "model"
    if (merged / "model.safetensors").is_file():  # of a recipe
        fix = f"take the merged model in {merged}"
    else:
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
        checkpoint = find_checkpoint(storage, tag)
        try:
            archive = Archive(checkpoint)
            archive.verify(kinds)
            archive.open(kinds)
        except (CheckpointError, OSError):
            if not checkpoint.replaced():
                raise
            continue
        if not checkpoint.replaced():
            return archive
    raise CheckpointError(f"the checkpoint {checkpoint.where} {WHILE_READ}")


class Archive:
    """A checkpoint that is open for reading.

    The ranks' JSON files are always checked; :meth:`verify` checks their tensors. In a bucket, with ``verify``, a
    file is checked again when it is fetched by another rank than the one that checked it.
    """

    def __init__(self, checkpoint: Checkpoint, verify: bool = True):
        checkpoint.require_files()
        self.checkpoint = checkpoint
        self.where, self.degrees = checkpoint.where, checkpoint.degrees
        self._verify = verify
        self._verified: set[str] = set()
        self._records: dict[int, dict[str, Any]] = {}
        self._files: dict[str, _File] = {}

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
            self._records[rank] = _read_record(self.checkpoint.read(name), f"{self.where}/{name}")
        return self._records[rank]

    def parts(self, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield ``(rank, description)`` of the model or the optimizer, for the ranks that saved a part of it."""
        for rank in range(self.checkpoint.manifest.world_size):
            part = self.record(rank).get(kind)
            if part is not None:
                yield rank, part

    def pieces(self, kind: str) -> list[Shard]:
        """Return all pieces of the model or the optimizer. Raises CheckpointError if there are none."""
        shards: list[Shard] = []
        saved = False
        for rank, part in self.parts(kind):
            saved = saved or "pieces" in part
            tp_rank = self.record(rank)["place"]["tp"]
            file, where = self.file(part["file"]), f"{self.where}/{rank_stem(rank)}.json"
            for name, piece in part.get("pieces", {}).items():
                shards.append(Shard(name, tp_rank, file, **_read_piece(name, piece, where)))
        if not saved:
            raise CheckpointError(f"{self.where} holds no {kind}, or not of a module; it was saved without")
        return shards

    def adapter_files(self) -> list[str]:
        """Return the files of the LoRA adapter beside the weights, in PEFT's format."""
        return [name for name in self.checkpoint.manifest.files if name.startswith(f"{SUBFOLDER}/")]

    def copy_adapter(self, folder: Path) -> None:
        """Copy these files, which are the same at any degrees, into ``folder``."""
        folder.mkdir(exist_ok=True)
        for name in self.adapter_files():
            (folder / name.rpartition("/")[2]).write_bytes(self.checkpoint.read(name))

    def file(self, name: str) -> _File:
        if name not in self._files:
            fetched = self._verify and not self.checkpoint.storage.local
            self._files[name] = _File(self.checkpoint, name, self._verify_one if fetched else None)
        return self._files[name]

    def value(self, rank: int, kind: str) -> Any:
        """Return what a rank saved without runs: ``"values"``, or a model or optimizer that was a dictionary."""
        where, part = f"{self.where}/{rank_stem(rank)}.json", self.record(rank).get(kind, {})
        if "structure" not in part:
            raise CheckpointError(f"{where} holds no {kind!r} with a 'structure'; {FIX}")
        # Clone: a tensor of the mapped file would keep a removed checkpoint on the disk.
        value = unpack(part["structure"], lambda number: self.file(part["file"]).read(number).clone())
        if kind == "values" and not (isinstance(value, dict) and (rank or "user_content" in value)):
            raise CheckpointError(f"{where}: {kind!r}: it has no 'user_content'; {FIX}")
        return value


KINDS = ("model", "optimizer", "values")
FIX = "restore the file, or load another tag"
DAMAGE = (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, ShardingError)


def _read_record(text: bytes, where: str) -> dict[str, Any]:
    """Read a rank's JSON record. Raises CheckpointError if it is not a valid record.

    Each of KINDS in it has ``file``, and either ``structure`` or ``pieces``; an optimizer's pieces also
    ``param_groups``. ``place`` is the rank's place in the job.
    """
    try:
        record = parse_json(text)
        if not all(_whole(record["place"][axis]) for axis in ("tp", "dp")):
            raise ValueError("'place' is not of numbers")
        for kind in KINDS:
            part = record.get(kind, {"file": ""})
            if not isinstance(part["file"], str) or not isinstance(part.get("pieces", {}), dict):
                raise ValueError(f"{kind!r} has no 'file' or no 'pieces'")
    except DAMAGE as error:
        raise CheckpointError(f"{where} is damaged: {error!r:.200}; {FIX}") from error
    return record


def _read_piece(name: str, piece: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of an archive's ``Shard`` that are stored with it. Raises CheckpointError if one is invalid."""
    try:
        start, stop = _numbers(piece["range"])
        layout, shape = TensorLayout.from_json(piece["layout"]), _numbers(piece["shape"])
        logical = {key: _numbers(of_all) for key, of_all in piece["logical"].items()}
        agree = layout.shape == shape and start <= stop <= math.prod(shape) and logical.keys() >= set(layout.names)
        if not agree or any(len(of_all) != len(shape) for of_all in logical.values()):
            raise ValueError("its layout, its shapes and its range do not agree")
        return {
            "layout": layout,
            "shape": shape,
            "start": start,
            "stop": stop,
            "logical": logical,
            "values": dict(piece.get("values", {})),
            "plans": read_plans(piece["plans"]) if piece.get("plans") else None,
            "dtype": piece.get("dtype"),
        }
    except DAMAGE as error:
        raise CheckpointError(f"{where}: {name!r} is damaged: {error!r:.200}; {FIX}") from error


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(values: Any) -> tuple[int, ...]:
    """Return sizes or indices of a tensor."""
    if not all(_whole(value) and value >= 0 for value in values):
        raise ValueError(f"{values!r:.80} are not sizes")
    return tuple(values)
