"""Fill a parallel model with this rank's part of logical weights, one tensor at a time."""

from __future__ import annotations

import torch
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.layout import restore_attributes, shard_tensor, weight_layout
from nxd_infer.layout.shard import check_weights
from nxd_infer.layout.sources import SelectedSource, Weights, as_source


def fill(model: nn.Module, weights: Weights, *, device: torch.device | None = None) -> None:
    """Replace what is on the meta device by this rank's part of ``weights``; the rest of the model stays as it is.

    ``device``: where new tensors are put; None: the host. Raises WeightMismatchError for a weight that is missing or
    has another shape.
    """
    here = current_context().tp
    layouts = weight_layout(model)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    wanted = {name: layout for name, layout in layouts.items() if tensors[name].is_meta}
    names = {logical for layout in wanted.values() for logical in layout.logical_names}
    source = SelectedSource(as_source(weights), names.__contains__)
    check_weights(wanted, source)
    made: dict[int, nn.Parameter] = {}
    for name, layout in wanted.items():
        old = tensors[name]
        path, _, own = name.rpartition(".")
        owner = model.get_submodule(path)
        if id(old) in made:
            owner.register_parameter(own, made[id(old)])
            continue
        new = shard_tensor(source, layout.rank_layout(here.degree, here.rank), old.dtype, device)
        if isinstance(old, nn.Parameter):
            made[id(old)] = nn.Parameter(new, old.requires_grad)
            owner.register_parameter(own, made[id(old)])
        else:
            owner.register_buffer(own, new)
    restore_attributes(model)
