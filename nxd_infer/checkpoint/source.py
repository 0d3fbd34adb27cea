"""Logical weights from any source: tensors, safetensors, a training checkpoint, a model in training.

Those of a model on several ranks are gathered on the first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.checkpoint.archive import opened_whole, require_no_adapter
from nxd_infer.checkpoint.folder import holds_checkpoint
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.comm.texts import gather_named
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.hugging_face.weights import stored_weights
from nxd_infer.layout import MergedSource, ParamLayout, WeightSource, as_source, merge_state_dicts, weight_layout
from nxd_infer.layout.merge import RunsSource
from nxd_infer.layout.sources import named_tensors
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.nxd_model import local_module

__all__ = ["Weights", "gather_weights", "weight_source"]

Weights = WeightSource | Mapping[str, Tensor] | str | os.PathLike[str] | nn.Module


def weight_source(weights: Weights, tag: str | None = None) -> WeightSource:
    """Return the unsharded weights of ``weights``; weights in files are read slice by slice.

    Args:
        weights: tensors by name; a WeightSource; the path of safetensors (a file or a directory), or of a folder of
            ``save_checkpoint``, saved at any degrees; or the model itself, if this process holds all of it (degree 1;
            adapters are merged).
        tag: the checkpoint in the folder. Default: the newest complete one.

    Raises CheckpointError if there is no such checkpoint, it holds no weights of a module, or it is damaged.
    """
    if isinstance(weights, str | os.PathLike):
        return _stored(weights, tag)
    if tag is not None:
        raise CheckpointError(f"the tag {tag!r} names a checkpoint in a folder, and {type(weights).__name__} is none")
    if isinstance(weights, nn.Module):
        return _whole_weights(weights)
    return as_source(weights)


def _stored(path: str | os.PathLike[str], tag: str | None) -> WeightSource:
    storage = storage_of(path)
    if tag is None and not holds_checkpoint(storage):
        return stored_weights(path)
    archive = opened_whole(storage, tag, ["model"])
    source = RunsSource(archive.pieces("model"))
    require_no_adapter(source, archive.where)
    return source


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the logical weights of ``model``, which may be an NxDModel; a LoRAModel's adapters are merged.

    Every rank of the tensor-, expert- and pipeline-parallel groups calls it. Tensors are gathered one by one, and the
    first rank of the first stage gets copies of them all, on the CPU; the others get none. (``save_checkpoint`` needs
    no memory for the whole model.)
    """
    context = current_context()
    degree = context.tp.degree
    gathered: dict[str, Tensor] = {}
    for name, tensor, layout in _weights(model):
        if layout.expert_dim >= 0:
            tensor = comm.all_gather(tensor.contiguous(), context, "ep", layout.expert_dim)
            layout = layout.of_all_experts()
        ranks = [tensor] * degree
        if layout.sharded and degree > 1:
            ranks = list(comm.all_gather(tensor[None].contiguous(), context, "tp", dim=0).unbind(0))
        if context.tp.rank == 0:
            gathered.update(merge_state_dicts([{name: rank.cpu()} for rank in ranks], {name: layout}))
    return gather_named(gathered, context) if context.tp.rank == 0 else {}


@torch.no_grad()
def _whole_weights(model: nn.Module) -> WeightSource:
    """Return the logical weights of a ``model`` of degree 1, read on demand: the model is not copied.

    Raises CheckpointError if this process holds only a shard of it.
    """
    context = current_context()
    if context.pp.degree > 1:
        raise CheckpointError(
            f"this rank holds one of {context.pp.degree} pipeline stages: save the model with save_checkpoint() and "
            "take the weights from there"
        )
    held = next((axis for axis in (context.tp, context.ep) if axis.degree > 1), None)
    if held is not None:
        raise CheckpointError(
            f"this process holds the shard of {held.name} rank {held.rank} of {held.degree}: call "
            "nxd_infer.trainer.gather_weights(model) on all of them, and give what it returns on the first"
        )
    weights = list(_weights(model))
    tensors = {name: tensor for name, tensor, _ in weights}
    return MergedSource([tensors], {name: layout for name, _, layout in weights})


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, ParamLayout]]:
    """Yield name, this rank's tensor and layout of everything in the state dict, tied weights once."""
    module = local_module(model)
    if isinstance(module, LoRAModel):
        weights = module.merged_weights()
    else:
        tensors = named_tensors(module)
        weights = ((name, tensors[name].detach(), layout) for name, layout in weight_layout(module).items())
    yield from ((name, tensor, layout) for name, tensor, layout in weights if not layout.alias_of)
