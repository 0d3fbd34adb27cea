"""The unsharded weights of a model in training under their logical names, for a traced model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.comm.texts import gather_named
from nxd_infer.context import current_context
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import MergedSource, ParamLayout, WeightSource, merge_state_dicts, weight_layout
from nxd_infer.layout.shard import named_tensors
from nxd_infer.modules.lora import LoRAModel
from nxd_infer.modules.nxd_model import local_module

__all__ = ["gather_weights", "whole_weights"]


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the logical weights of ``model``, which may be an NxDModel; a LoRAModel's adapters are merged.

    Every rank of the tensor- and pipeline-parallel groups calls it. Tensors are gathered one by one, and the first rank
    of the first stage gets copies of them all, on the CPU; the others get none. (``save_checkpoint`` needs no memory
    for the whole model.)
    """
    context = current_context()
    degree = context.tp.degree
    found: dict[str, Tensor] = {}
    for name, tensor, layout in _weights(model):
        ranks = [tensor] * degree
        if layout.sharded and degree > 1:
            ranks = list(comm.all_gather(tensor[None].contiguous(), context, "tp", dim=0).unbind(0))
        if context.tp.rank == 0:
            found.update(merge_state_dicts([{name: rank.cpu()} for rank in ranks], {name: layout}))
    return gather_named(found, context) if context.tp.rank == 0 else {}


@torch.no_grad()
def whole_weights(model: nn.Module) -> WeightSource:
    """Return the logical weights of a ``model`` of degree 1, read on demand: the model is not copied.

    Raises CheckpointError if this process holds only a shard of it.
    """
    context = current_context()
    _require_one_stage()
    if context.tp.degree > 1:
        raise CheckpointError(
            f"this process holds the shard of rank {context.tp.rank} of {context.tp.degree}: call "
            "nxd_infer.trainer.gather_weights(model) on all of them, and give what it returns on the first"
        )
    weights = list(_weights(model))
    tensors = {name: tensor for name, tensor, _ in weights}
    return MergedSource([tensors], {name: layout for name, _, layout in weights})


def _require_one_stage() -> None:
    stages = current_context().pp.degree
    if stages > 1:
        raise CheckpointError(
            f"this rank holds one of {stages} pipeline stages: save the model with save_checkpoint() and take the "
            "weights from there"
        )


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor, ParamLayout]]:
    """Yield name, this rank's tensor and layout of everything in the state dict, tied weights once."""
    module = local_module(model)
    if isinstance(module, LoRAModel):
        found = module.merged_weights()
    else:
        here = named_tensors(module)
        found = ((name, here[name].detach(), layout) for name, layout in weight_layout(module).items())
    yield from ((name, tensor, layout) for name, tensor, layout in found if not layout.alias_of)
