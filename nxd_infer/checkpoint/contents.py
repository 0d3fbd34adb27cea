"""Collect what one rank saves: tensors by file, and the record of their layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.checkpoint.folder import model_file, rank_stem
from nxd_infer.checkpoint.random_state import random_state
from nxd_infer.context import AXES, ParallelContext
from nxd_infer.layout import ParamLayout, weight_layout
from nxd_infer.layout.describe import describe_piece
from nxd_infer.layout.files.one_rank import storable
from nxd_infer.layout.files.values import pack, pack_named
from nxd_infer.layout.merge import is_saved_by
from nxd_infer.layout.sources import named_tensors
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.nxd_model import local_module
from nxd_infer.optimizer.parallel import NxDOptimizer
from nxd_infer.optimizer.sharded_files import describe, stem
from nxd_infer.pipeline.model import NxDPPModel
from nxd_infer.pipeline.stage import Stage


@dataclass(frozen=True)
class Unread:
    """A tensor that is read when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass
class Content:
    """What one rank saves: tensors by file name, and the record of their layouts."""

    files: dict[str, Mapping[str, Tensor | Unread]]
    record: dict[str, Any]
    write_adapter: Callable[[Path], None] | None = None
    """Writes a LoRA model's adapter into a folder, for PEFT; only on rank 0."""


def collect(
    context: ParallelContext,
    model: nn.Module | Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer | Mapping[str, Any] | None,
    zero1_optimizer: bool,
    values: Mapping[str, Any],
    own_values: Mapping[str, Any],
    copy: bool,
) -> Content:
    """Collect this rank's part. Every rank saves ``own_values``; ``values`` are added on rank 0.

    ``copy`` makes it independent of later training steps.

    Raises CheckpointError for values that JSON and safetensors cannot hold, with the path to them.
    """
    files: dict[str, dict[str, Tensor]] = {}
    record: dict[str, Any] = {"place": {axis: context.axis(axis).rank for axis in AXES}}

    def add(kind: str, name: str, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
        files[name], record[kind] = tensors, {"file": name, **description}

    def add_values(kind: str, name: str, values: Any) -> None:
        structure, tensors = pack(values, what=kind)
        add(kind, name, tensors, {"structure": structure})

    # The first copy of what a rank holds; beyond the first expert parallel rank that is experts only.
    first = context.edp.rank == 0
    experts_only = context.ep.rank > 0
    if model is not None and first:
        if isinstance(model, nn.Module):
            tensors, pieces = _describe_model(local_module(model), context, stage_of(model), experts_only)
            if pieces or not experts_only:
                add("model", model_file(context), tensors, {"pieces": pieces})
        else:
            add_values("model", model_file(context), model)
    sharded = optimizer.zero1 if isinstance(optimizer, NxDOptimizer) else zero1_optimizer
    if isinstance(optimizer, Mapping):
        sharded = sharded or bool(optimizer.get("zero1"))  # of a NxDOptimizer
    if optimizer is not None and (first or (sharded and context.cp.rank == 0)):
        name = f"{stem(context)}.safetensors"
        if isinstance(optimizer, NxDOptimizer):
            add("optimizer", name, *describe(optimizer, experts_only and not sharded))
        else:
            plain = isinstance(optimizer, torch.optim.Optimizer)
            add_values("optimizer", name, optimizer.state_dict() if plain else optimizer)
    extra = modules_with_extra_state(local_module(model)) if isinstance(model, nn.Module) else {}
    if extra:
        own_values = {**own_values, EXTRA: {name: module.get_extra_state() for name, module in extra.items()}}
    name = f"{rank_stem(context.rank)}.safetensors"
    own_values = {**own_values, "random": random_state(), **(values if context.rank == 0 else {})}
    structure, files[name] = pack_named(own_values)
    record["values"] = {"file": name, "structure": structure}
    return Content({name: storable(tensors, copy) for name, tensors in files.items()}, record)


EXTRA = "extra_state"


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose state is more than tensors, by name."""
    default = nn.Module.get_extra_state
    return {name: one for name, one in model.named_modules() if type(one).get_extra_state is not default}


def stage_of(model: nn.Module) -> Stage | None:
    """What this rank holds of a pipelined model; None if that is all of it."""
    return model.stage if isinstance(model, NxDPPModel) else None


def _describe_model(
    model: nn.Module, context: ParallelContext, stage: Stage | None, experts_only: bool
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the parameters and buffers with elements that this rank is the first to hold, and their runs."""
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Any] = {}
    degree, rank = context.tp.degree, context.tp.rank
    for name, (tensor, layout) in _weights(model).items():
        if experts_only and layout.expert_dim < 0:
            continue
        if is_saved_by(layout, degree, rank) and (stage is None or stage.saves(name)):
            tensors[name] = tensor.detach()
            pieces[name] = describe_piece(layout, degree, rank, tensor.shape, 0, tensor.numel())
    return tensors, pieces


def _weights(model: nn.Module) -> dict[str, tuple[Tensor, ParamLayout]]:
    """Return what is saved of a model: with LoRA what its configuration selects, else everything."""
    if isinstance(model, LoRAModel):
        return model.saved_weights()
    tensors = named_tensors(model)
    return {name: (tensors[name], layout) for name, layout in weight_layout(model).items()}
