"""Adapters in PEFT's format: ``adapter_model.safetensors`` and ``adapter_config.json`` in a folder.

With ``save_lora_config_adapter`` a checkpoint has no second file: its content is in the header of the first.

The file has full logical tensors, whatever the degree: ``base_model.model.<path>.lora_A.weight`` [rank, in] and
``lora_B.weight`` [out, rank], for embeddings ``lora_embedding_A`` [rank, vocabulary] and ``lora_embedding_B``, and the
trained weights of the base. q, k and v of a fused layer are three projections, under their own names.

Source: PEFT documentation, "PEFT checkpoint format".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nxd_infer import comm
from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.comm.texts import gather_named
from nxd_infer.comm.turns import in_turns
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError, WeightMismatchError
from nxd_infer.layout import ParamLayout, SafetensorsSource, fill_tensor, layout_of, merge_state_dicts
from nxd_infer.layout.files.atomic import replacing
from nxd_infer.layout.shard import weight_mismatch
from nxd_infer.layout.sources import open_safetensors
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.modules.lora.find import CONFIG, SUBFOLDER, WEIGHTS, Folder, find_together, of_checkpoint
from nxd_infer.modules.lora.layers import Place

if TYPE_CHECKING:
    from nxd_infer.modules.lora.model import LoRAModel

__all__ = ["load_adapter", "save_adapter"]

CONFIG_KEY = "adapter_config"
"""Key of the configuration in the header of the weights."""
PREFIX = "base_model.model."


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of this rank (a view of the parameter) and the logical tensors of the file that make it up."""

    name: str
    tensor: Tensor
    layout: ParamLayout
    place: Place
    adapter: bool
    tied: bool = False
    """Whether it is a further name of a tied weight, whose ``name`` is the first."""

    @property
    def degree(self) -> int:
        return self.place[0].axis(self.place[1]).degree

    def read(self, source: SafetensorsSource, out: Tensor | None = None) -> Tensor:
        """Read into ``out``, which is the parameter by default, and return it."""
        rank, out = self.place[0].axis(self.place[1]).rank, self.tensor if out is None else out
        fill_tensor(out, source, self.layout.rank_layout(self.degree, rank))
        return out

    def whole(self) -> dict[str, Tensor]:
        """Return the logical tensors; every rank of the axis must call it."""
        ranks: list[Tensor] = [self.tensor] * self.degree
        if self.layout.sharded and self.degree > 1:
            ranks = list(comm.all_gather(self.tensor[None].contiguous(), *self.place, dim=0).unbind(0))
        return merge_state_dicts([{self.name: tensor.cpu()} for tensor in ranks], {self.name: self.layout})


def entries(model: LoRAModel) -> Iterator[Entry]:
    """Yield everything of the model that an adapter file can hold, the factors first."""
    for path, layer in model.lora_layers.items():
        for part, a, b in layer.factors():
            for kind, factor in (("A", a), ("B", b)):
                tensor = factor.get_parameter("weight").detach()
                layout = layout_of(factor, "weight") or ParamLayout.of(list(tensor.shape))
                name = f"lora_embedding_{kind}" if layer.embedding else f"lora_{kind}.weight"
                if layer.embedding and kind == "A":
                    tensor, layout = tensor.T, ParamLayout(layout.axes[::-1])
                logical = f"{PREFIX}{layer.paths[part]}.{name}"
                layout = replace(layout, sources=(("", logical),))
                yield Entry(f"{path}.{part}.{name}", tensor, layout, layer.place, True)
    adapted = {logical for layer in model.lora_layers.values() for logical in layer.paths.values()}
    aliases: dict[str, list[ParamLayout]] = {}
    for layout in model.whole_layouts.values():
        if layout.alias_of:
            aliases.setdefault(layout.alias_of, []).append(layout)
    for name, tensor in model.module.state_dict().items():
        base = model.base_name(name)
        first = model.base_layouts.get(base)
        if first is None or first.alias_of:  # no weight, or another name of one
            continue
        for one in (first, *aliases.get(base, ())):
            sources = tuple((part, _base_name(logical, adapted)) for part, logical in one.sources)
            layout = replace(first, sources=sources)
            yield Entry(name, tensor.detach(), layout, (current_context(), "tp"), False, tied=one is not first)


def _elsewhere(model: LoRAModel) -> set[str]:
    """Return the names in a file of what other pipeline stages hold."""
    adapted = model.adapted_elsewhere
    kinds = ("lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B")
    names = {f"{PREFIX}{path}.{kind}" for path in adapted for kind in kinds}
    others = model.whole_layouts.keys() - model.base_layouts.keys()
    return names | {_base_name(name, adapted) for one in others for name in model.whole_layouts[one].logical_names}


def _base_name(logical: str, adapted: set[str]) -> str:
    path, _, leaf = logical.rpartition(".")
    return f"{PREFIX}{path}.base_layer.{leaf}" if path in adapted else PREFIX + logical


def save_adapter(model: LoRAModel, folder: Folder) -> None:
    """Write the adapter and the other trained weights. Every rank must call it; global rank 0 writes.

    Files are replaced one by one, the weights first. Raises CheckpointError, on all ranks, if they cannot be written,
    and NotInitializedError in one of several processes before ``initialize_model_parallel()``, where all would write
    them.
    """
    require_no_lonely_rank("save_adapter")
    tensors, config = collect_adapter(model)
    context = current_context()

    def write() -> None:
        if context.rank == 0:
            write_adapter(Path(folder), tensors, config)

    in_turns(context, context.world_size, write, of_world=True)  # all fail together


def collect_adapter(model: LoRAModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the content of the adapter's two files, copied. Every rank must call it; rank 0 gets all stages'."""
    trained, tensors, context = model.trained_names(), {}, current_context()
    for entry in entries(model):
        if entry.adapter or entry.name in trained:
            tensors.update({name: tensor.clone().contiguous() for name, tensor in entry.whole().items()})
    return gather_named(tensors, context), model.lora_config.to_peft(_targets(model))


def write_adapter(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], apart: bool = True) -> None:
    """Write the weights, then the configuration: in its own file if ``apart``, else in the weights' file.

    Raises CheckpointError if they cannot be written.
    """
    inside = {} if apart else {CONFIG_KEY: json.dumps(config)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / WEIGHTS) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", **inside})
        if apart:
            with replacing(folder / CONFIG) as temporary:
                temporary.write_text(json.dumps(config, indent=2) + "\n")
        else:
            (folder / CONFIG).unlink(missing_ok=True)  # it would take precedence over the one in the weights
    except OSError as error:
        raise CheckpointError(f"{folder}: the adapter cannot be written: {error}") from error


def paths_of_all(model: LoRAModel) -> set[str]:
    """Return the logical paths of the adapted projections of all pipeline stages."""
    return model.adapted_elsewhere | {path for layer in model.lora_layers.values() for path in layer.paths.values()}


def _targets(model: LoRAModel) -> list[str]:
    """Return the adapted projections by PEFT's rule: last components if they match no other layer, else full paths."""
    adapted = paths_of_all(model)
    weights = {name for layout in model.whole_layouts.values() for name in layout.logical_names}
    others = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")} - adapted
    short = {path.rpartition(".")[2] for path in adapted}
    return sorted(adapted if any(path.rpartition(".")[2] in short for path in others) else short)


# --- reading ----------------------------------------------------------------------------------------------


def read_config(folder: Path, config: LoraConfig) -> LoraConfig:
    """Return ``config`` updated from the adapter in ``folder``. Raises CheckpointError if it cannot be read."""
    path = folder / CONFIG
    try:
        if path.is_file() or not (folder / WEIGHTS).is_file():
            text = path.read_text()
        else:
            path = folder / WEIGHTS
            with open_safetensors(path) as file:
                text = (file.metadata() or {}).get(CONFIG_KEY)
            if text is None:
                raise CheckpointError(f"{folder} has no {CONFIG}, and {WEIGHTS} has no configuration; restore the file")
        stored = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(stored).__name__}")
    return config.with_peft(stored, path)


def base_beside(folder: Path) -> Path | None:
    """Return the checkpoint of the adapter in ``folder`` if it holds the base weights too, not merged; else None."""
    saved = read_config(folder, LoraConfig())
    inside = folder.name == SUBFOLDER and of_checkpoint(folder.parent)
    return folder.parent if inside and saved.save_lora_base and not saved.merge_lora else None


def adapted_paths(folder: Path) -> set[str]:
    """Return the logical paths of the projections that the adapter in ``folder`` changes."""
    names = SafetensorsSource(folder / WEIGHTS).keys()
    return {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in names if ".lora_" in name}


def load_adapter(model: LoRAModel, folder: Folder) -> None:
    """Load an adapter of this package or of PEFT into a model with the same layers adapted. Every rank must call it.

    Base weights in the file are loaded too. Everything is checked before anything changes. Raises WeightMismatchError
    naming what is missing, unexpected or of another shape, and CheckpointError for files that cannot be read or whose
    configuration has another scaling.
    """
    model.require_unmerged()
    load_found(model, find_together(folder))


@torch.no_grad()
def load_found(model: LoRAModel, folder: Path) -> None:
    """Like :func:`load_adapter`, for an adapter that has been found."""
    stored = read_config(folder, model.lora_config)
    if stored.scaling != model.lora_config.scaling:
        raise CheckpointError(
            f"{folder}: the adapter's scaling is {stored.scaling}, the model's is {model.lora_config.scaling}; "
            "load it with LoraConfig(load_lora_from_ckpt=True, lora_save_dir=...)"
        )
    source = SafetensorsSource(folder / WEIGHTS)
    names, every = set(source.keys()), list(entries(model))
    chosen = [entry for entry in every if names >= entry.layout.logical_shapes.keys()]
    required = [
        entry
        for entry in every
        if not entry.tied
        and (
            entry.adapter
            or model.saved_whole(model.base_name(entry.name))
            or names & entry.layout.logical_shapes.keys()
        )
    ]
    missing = [name for entry in required for name in entry.layout.logical_shapes if name not in names]
    shapes = {name: shape for entry in chosen for name, shape in entry.layout.logical_shapes.items()}
    unexpected = sorted(names - shapes.keys() - _elsewhere(model))
    mismatched = [(name, source.shape(name), shape) for name, shape in shapes.items() if source.shape(name) != shape]
    if missing or unexpected or mismatched:
        raise weight_mismatch(f"{folder}: the adapter does not fit the model", missing, unexpected, mismatched)
    first = {entry.name: entry for entry in chosen if not entry.tied}
    for entry in (entry for entry in every if entry.tied):
        pair = [one for one in (first.get(entry.name), entry) if one in chosen]
        copied = entry in pair or (pair and model.saved_whole(model.base_name(entry.name)))
        if copied and not _equal(pair, source):  # modules to save of PEFT are copies, which are not tied
            raise WeightMismatchError(
                f"{folder}: {entry.layout.logical_names[0]!r} is one weight with another one of this model, and the "
                "adapter was trained with two different ones: build the model without tying them"
            )
    for entry in chosen:
        entry.read(source)


def _equal(pair: list[Entry], source: SafetensorsSource) -> bool:
    """Return whether a file has the two names of a tied weight, with the same values."""
    values = [entry.read(source, torch.empty_like(entry.tensor)) for entry in pair]
    return len(values) == 2 and torch.equal(*values)
