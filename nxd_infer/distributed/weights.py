"""Fill a parallel model with this rank's part of logical weights, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import restore_attributes, shard_tensor, weight_layout
from nxd_infer.layout.shard import check_weights, named_tensors
from nxd_infer.layout.sources import SelectedSource, Slices, Weights, WeightSource, as_source


def on_meta(model: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers without values, in the whole model's terms."""
    tensors = named_tensors(model)
    layouts = weight_layout(model).items()
    return [logical for name, layout in layouts if tensors[name].is_meta for logical in layout.logical_names]


class FirstOf:
    """Several sources of weights; a name is read from the first that has it."""

    def __init__(self, *sources: WeightSource):
        self._owners = {name: source for source in reversed(sources) for name in source.keys()}  # noqa: SIM118

    def keys(self) -> Iterable[str]:
        return self._owners

    def shape(self, name: str) -> tuple[int, ...]:
        return self._owners[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._owners[name].dtype(name)

    def read(self, name: str, slices: Slices | None = None) -> Tensor:
        return self._owners[name].read(name, slices)


def fill(model: nn.Module, weights: Weights, *, device: torch.device | None = None) -> None:
    """Replace what is on the meta device by this rank's part of ``weights``; the rest of the model stays as it is.

    ``device``: where new tensors are put; None: the host. Raises WeightMismatchError for a weight that is missing or
    has another shape.
    """
    here = current_context().tp
    layouts = weight_layout(model)
    tensors = named_tensors(model)
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
