"""An adapter for a traced model: PEFT's two files, sharded into one slot of every rank's tables. Compiles nothing.

A model with slots (``nxd_infer.modules.lora.add_adapter_slots``) has tables A and B for each targeted layer, whose
first dimension is the slot. ``manifest.layout["adapters"]`` describes how a rank's table is assembled from the logical
one, as ``layout["weights"]`` does for weights. A rank gets a safetensors file with the entries of one slot, named
``<table>[<slot>]``, and copies them into its tables between two steps.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import INLINE_WEIGHTS_REQUIREMENT, Manifest, WeightSpec
from nxd_infer.artifact.rank_weights import entry_name
from nxd_infer.errors import AdapterError, CheckpointError, ParallelConfigError
from nxd_infer.layout import Fill, Run, SafetensorsSource, TensorLayout, shard_tensor
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.modules.lora.find import CONFIG, WEIGHTS, is_adapter
from nxd_infer.modules.lora.peft import PREFIX, read_config
from nxd_infer.runtime.updates.weights import anonymous_file


@dataclass(frozen=True)
class _Table:
    """One table of one layer: its spec on a rank, and its layout on every rank."""

    spec: WeightSpec
    logical: tuple[int, ...]
    """The full shape: first slots + 1, then the slot's matrix."""
    ranks: Sequence[Any]

    @property
    def kind(self) -> str:
        """``A`` or ``B``."""
        return self.spec.name[-1]

    @property
    def rank(self) -> int:
        return self.logical[1 if self.kind == "A" else 2]


class AdapterUpdate:
    """One checked adapter for one slot; :meth:`write` shards it for a rank."""

    def __init__(self, manifest: Manifest, slot: int, folder: str | os.PathLike[str] | None):
        """``folder`` holds ``adapter_config.json`` and ``adapter_model.safetensors``; None empties the slot.

        Raises AdapterError naming what does not fit: the value, the limit, and the fix.
        """
        tables = manifest.layout.get("adapters", {})
        if not tables or INLINE_WEIGHTS_REQUIREMENT in manifest.requires:
            raise AdapterError("the model was traced without slots for adapters: trace it again with --lora-slots")
        specs = {spec.name: spec for spec in manifest.weights}
        self._tables: dict[str, _Table] = {}
        """Tables by PEFT's name of the factor."""
        for name, entry in tables.items():
            ((logical, shape),) = entry["logical"].items()
            self._tables[PREFIX + logical] = _Table(specs[name], tuple(shape), entry["ranks"])
        self.manifest = manifest
        first = next(iter(self._tables.values()))
        self.slot, self.max_rank = slot, first.rank
        if isinstance(slot, bool) or not isinstance(slot, int) or not 1 <= slot < first.logical[0]:
            raise AdapterError(f"slot {slot!r} is none of this model's, which are 1 to {first.logical[0] - 1}")
        self.rank, self.scaling = 0, 1.0
        """The adapter's rank and scaling; rank 0 means none."""
        self._source: SafetensorsSource | None = None
        self._held: frozenset[str] = frozenset()
        if folder is not None:
            self._read(Path(folder))
        self.names = [entry_name(table.spec.name, slot) for table in self._tables.values()]

    # --- reading --------------------------------------------------------------------------------------

    def _read(self, folder: Path) -> None:
        if not is_adapter(folder):
            raise AdapterError(f"{folder} holds no adapter: there is no {CONFIG} in it")
        if not (folder / WEIGHTS).is_file():
            raise AdapterError(
                f"{folder} holds no {WEIGHTS}; pickled weights are never loaded, because reading them runs code: save "
                "the adapter with safe_serialization=True"
            )
        try:
            config = read_config(folder, LoraConfig())
            self._source = SafetensorsSource(folder / WEIGHTS)
            names = list(self._source.keys())
            shapes = {name: self._source.shape(name) for name in names}
            dtypes = {name: self._source.dtype(name) for name in names}
        except (CheckpointError, ParallelConfigError) as error:
            raise AdapterError(str(error)) from error
        self.rank, self.scaling = config.lora_rank, config.scaling
        if self.rank > self.max_rank:
            raise AdapterError(
                f"{folder}: the adapter's rank is {self.rank} and this model's slots hold at most {self.max_rank}: "
                f"trace it again with --lora-rank {self.rank}"
            )
        if wrong := [name for name, dtype in dtypes.items() if not dtype.is_floating_point]:
            raise AdapterError(f"{folder}: {wrong[0]} is {dtypes[wrong[0]]}, and a factor holds floating-point numbers")
        self._check_names(folder, shapes)
        for name, shape in shapes.items():
            table = self._tables[name]
            expected = (self.rank, table.logical[2]) if table.kind == "A" else (table.logical[1], self.rank)
            if shape != expected:
                raise AdapterError(
                    f"{folder}: {name} has the shape {list(shape)}, and {list(expected)} fits this model"
                )
        self._held = frozenset(shapes)

    def _check_names(self, folder: Path, names: Collection[str]) -> None:
        """Check that every tensor is a factor with a table, and none lacks its counterpart."""
        for name in names:
            if name in self._tables:
                continue
            targets = sorted({factor.split(".")[-3] for factor in self._tables})
            if name.startswith(PREFIX) and name.endswith((".lora_A.weight", ".lora_B.weight")):
                path = name.removeprefix(PREFIX).rpartition(".lora_")[0]
                raise AdapterError(
                    f"{folder}: the adapter changes {path}, which has no slots in this model (its targets are "
                    f"{', '.join(targets)}): trace it again with --lora-targets that include it"
                )
            raise AdapterError(
                f"{folder}: the adapter holds {name}, which is not a factor of a linear layer; a slot takes "
                f"lora_A.weight and lora_B.weight of {', '.join(targets)}: merge the adapter into the weights instead"
            )
        for name in names:
            other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
            if other not in names:
                raise AdapterError(f"{folder}: the adapter holds {name} without {other}; it is not complete")
        if not names:
            raise AdapterError(f"{folder}: the adapter holds no tensors")

    # --- sharding --------------------------------------------------------------------------------------

    def write(self, rank: int) -> BinaryIO:
        """Write the slot's entries of a rank's tables to an anonymous safetensors file; zeros if there are none."""
        own = {spec.name for spec in self.manifest.of_rank(rank).weights}
        tables = {
            entry_name(table.spec.name, self.slot): (name, table)
            for name, table in self._tables.items()
            if table.spec.name in own
        }
        entries = [(name, table.spec.torch_dtype, table.spec.shape[1:]) for name, (_, table) in tables.items()]
        return anonymous_file(entries, lambda name: self._entry(*tables[name], rank % self.manifest.tp_degree))

    def _entry(self, factor: str, table: _Table, rank: int) -> Tensor:
        dtype = table.spec.torch_dtype
        if factor not in self._held or self._source is None:
            return torch.zeros(table.spec.shape[1:], dtype=dtype)
        axes = list(TensorLayout.from_json(table.ranks[rank]).axes[1:])
        axes[0 if table.kind == "A" else 1] = (Run("", 0, self.rank), Fill(0.0, self.max_rank - self.rank))
        layout = TensorLayout(tuple(axes), factor)
        value = shard_tensor(self._source, layout, torch.promote_types(dtype, torch.float32))
        return (value * self.scaling if table.kind == "B" else value).to(dtype)
