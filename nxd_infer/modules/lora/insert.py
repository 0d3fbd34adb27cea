"""What inserting LoRA layers takes care of in the modules around them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator

from torch import nn

from nxd_infer.layout.params import restore_attributes
from nxd_infer.modules.lora.base import LoraLayer
from nxd_infer.util.devices import transport_device


def with_memory(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer on the meta device with memory that nobody writes, so it takes none."""
    made = copy.deepcopy(layer).to_empty(device=transport_device())
    restore_attributes(made)
    return made


@contextlib.contextmanager
def undone_if_it_fails(module: nn.Module) -> Iterator[None]:
    """Let ``module`` have the layers, and the parameters with gradients, that it had if the block raises."""
    children = [(parent, dict(parent._modules)) for parent in module.modules()]
    trained = [(param, param.requires_grad) for param in module.parameters()]
    try:
        yield
    except BaseException:
        for parent, before in children:
            parent._modules.update(before)
        for param, wanted in trained:
            param.requires_grad_(wanted)
        raise


def part_from_others(module: nn.Module, layers: Iterable[LoraLayer]) -> None:
    """Let adapted layers that are in ``module`` under another name without an adapter, too, stay there as they are.

    The adapted one is a copy then, with the same parameters: merging replaces its own.
    """
    parents = [parent for parent in module.modules() if not isinstance(parent, LoraLayer)]
    elsewhere = {id(child) for parent in parents for child in parent.children()}
    for layer in layers:
        if id(layer.base_layer) in elsewhere:
            base = copy.copy(layer.base_layer)
            base._parameters, base._buffers = dict(base._parameters), dict(base._buffers)
            layer.base_layer = base


def call_layers(module: nn.Module) -> None:
    """Let PyTorch's encoder layers call their adapted layers in evaluation, too: its fast path only reads the weights.

    Nested tensors are for that path alone.
    """
    for parent in module.modules():
        if isinstance(parent, nn.TransformerEncoder | nn.TransformerEncoderLayer) and any(
            isinstance(child, LoraLayer) for child in parent.modules()
        ):
            if isinstance(parent, nn.TransformerEncoder):
                parent.use_nested_tensor = False
            else:
                parent.activation_relu_or_gelu = 0
