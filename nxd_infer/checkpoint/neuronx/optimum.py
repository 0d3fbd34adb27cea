"""Read the shards of Optimum Neuron: the reference's files, and a table of what their tensors are parts of.

::

    OUT/shards/checkpoint, done, model/dp_rank_00_tp_rank_00_pp_rank_00.pt ...
               mp_metadata_pp_rank_0.json or .pt

The table has ``sharded_metadata`` (of each tensor whether it is split, and along which dimension) and, for key/value
heads that are replicated, ``gqa_qkv_metadata``. There, keys and values are whole blocks one after the other, and the
query heads are in the order in which each rank's belong to its key/value heads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.checkpoint.neuronx.archive import ReferenceArchive
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import AxisPlan, ParamLayout, Run
from nxd_infer.layout.files.pickles import read_pickle

_FILE = re.compile(r"^mp_metadata_pp_rank_(\d+)\.(json|pt)$")
_KIND = re.compile(r'"(\w+Spec)"')
"""The kind of a transformation that the newest releases describe. How they store its fields is not published."""
_GQA = "gqa_qkv_metadata"
_SHARDED = "sharded_metadata"
_NUMBERS = ("num_attention_heads", "num_key_value_heads", "kv_size_multiplier")


def metadata_files(folder: Path) -> dict[int, Path]:
    """Return the tables of the pipeline ranks of a checkpoint, in or beside its folder; {} if it has none."""
    for place in (folder, folder.parent):
        tables = {int(match[1]): place / name for name in _names(place) if (match := _FILE.match(name))}
        if tables:
            return tables
    return {}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def layouts_of(archive: ReferenceArchive, files: Mapping[int, Path]) -> dict[str, ParamLayout]:
    """Return the layouts of all tensors of the checkpoint, by their names in its files.

    Raises CheckpointError for a table that is damaged, or that describes what cannot be undone exactly.
    """
    degree = archive.degrees["tp"]
    layouts: dict[str, ParamLayout] = {}
    for stage, ranks in enumerate(archive.stages()):
        if stage not in files:
            raise CheckpointError(
                f"{archive.where} has {archive.degrees['pp']} pipeline stages, and of stage {stage} no table "
                f"(mp_metadata_pp_rank_{stage}.json or .pt); restore the file"
            )
        file = files[stage]
        table = _read(file)
        heads = _Heads.of(table.get(_GQA), degree, file)
        for name, tensor in ranks[0].items():
            entry = table[_SHARDED].get(name) or {}
            known = heads.layout(name, tuple(tensor.shape)) if heads is not None else None
            layouts[name] = known or _plain(name, tuple(tensor.shape), entry, degree, file)
    return layouts


def _read(file: Path) -> dict[str, Any]:
    try:
        table = json.loads(file.read_text(encoding="utf-8")) if file.suffix == ".json" else read_pickle(file)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not a table of Optimum Neuron: {error}") from error
    if not isinstance(table, dict) or not isinstance(table.get(_SHARDED), Mapping):
        raise CheckpointError(f"{file} has no {_SHARDED}: it is damaged, or of a release that cannot be read")
    more = [name for name, value in table.items() if name not in (_SHARDED, _GQA) and value]
    if more:
        kinds = sorted(set(_KIND.findall(file.read_text(encoding="utf-8")))) if file.suffix == ".json" else []
        which = f" ({', '.join(kinds)})" if kinds else ""
        raise CheckpointError(
            f"{file} also has {', '.join(map(str, more))}{which}, which are of a release that cannot be read; "
            "consolidate the checkpoint with the tool that wrote it"
        )
    return table


def _plain(name: str, shape: tuple[int, ...], entry: Any, degree: int, file: Path) -> ParamLayout:
    axes: list[AxisPlan | int] = list(shape)
    kind = entry.get("kind", "tied") if isinstance(entry, Mapping) else None
    if kind == "sharded":
        dim = entry.get("partition_dim")
        if isinstance(dim, bool) or not isinstance(dim, int) or not 0 <= dim < len(shape):
            raise CheckpointError(
                f"{file}: {name!r} of shape {list(shape)} cannot be split along dimension {dim!r:.80}"
            )
        axes[dim] = AxisPlan.even(shape[dim] * degree)
    elif kind != "tied":
        raise CheckpointError(f"{file}: {name!r} is {entry!r:.80}; it must be of the kind sharded or tied")
    return ParamLayout.of(axes, name)


@dataclass(frozen=True)
class _Heads:
    """Where replicated key/value heads, and the query heads that go with them, are on the ranks."""

    kv_heads: int
    multiplier: int
    degree: int
    originals: Mapping[str, str]
    """The names in the whole model, by those in the files."""
    outputs: frozenset[str]
    """The output projections."""

    @classmethod
    def of(cls, table: Any, degree: int, file: Path) -> _Heads | None:
        if not table:
            return None
        try:
            heads, kv_heads, multiplier = (int(table[name]) for name in _NUMBERS)
            originals = {str(stored): str(own) for own, stored in table["original_names_to_gqa_qkv_names"].items()}
            outputs = frozenset(map(str, table["output_projections_names"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file}: {_GQA} is damaged: {error!r}") from error
        if min(heads, kv_heads, multiplier) < 1 or kv_heads * multiplier != degree or heads % degree:
            raise CheckpointError(
                f"{file}: {heads} query heads and {kv_heads} key/value heads, {multiplier} times each, are on {degree} "
                "ranks; only one key/value head a rank can be read: for others the order of the query heads is unknown"
            )
        return cls(kv_heads, multiplier, degree, originals, outputs)

    def layout(self, name: str, shape: tuple[int, ...]) -> ParamLayout | None:
        """Return the layout of a query, key, value or output projection; None for another tensor."""
        axes: list[AxisPlan | int] = list(shape)
        if name in self.outputs and len(shape) == 2:
            axes[1] = self._queries(shape[1])
            return ParamLayout.of(axes, name)
        if name in self.outputs or name not in self.originals:
            return None
        if name.rpartition("_")[2] == "q":
            axes[0] = self._queries(shape[0])
        else:
            axes[0] = AxisPlan.from_runs([Run("", 0, shape[0] * self.kv_heads)] * self.multiplier)
        return ParamLayout.of(axes, self.originals[name])

    def _queries(self, rows: int) -> AxisPlan:
        """Return the order of the query features: rank r has a part of the heads of key/value head ``r % kv_heads``."""
        places = [rank % self.kv_heads * self.multiplier + rank // self.kv_heads for rank in range(self.degree)]
        return AxisPlan.from_runs([Run("", place * rows, (place + 1) * rows) for place in places])
