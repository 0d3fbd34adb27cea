"""Replace what modules return by given tensors, to find the module in which two models part::

    enable_tensor_replacement(model, {"layers.0.mlp": expected})     # names as tensor_capture gives them

A traced model has the tensors of the time of its trace as constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from nxd_infer.modules.tensor_capture import TensorCaptureError, module_named, named_tensors


@dataclass
class TensorReplacementConfig:
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class TensorReplacementRegister:
    """The tensors that take the place of a model's own; they may change between calls."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.tensors: dict[str, Tensor] = {}
        self._hooks: list[RemovableHandle] = []
        for path, module in model.named_modules():
            self._hooks.append(module.register_forward_hook(partial(self._replace, path), prepend=True))

    def register(self, name: str, tensor: Tensor) -> None:
        """Raises TensorCaptureError if there is no such module."""
        path, _, place = name.rpartition(".")
        module_named(self.model, path if place.isdigit() and name not in dict(self.model.named_modules()) else name)
        self.tensors[name] = tensor

    def clear(self) -> None:
        self.tensors.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _replace(self, path: str, module: nn.Module, arguments: Any, outputs: Any) -> Any:
        named = list(named_tensors(path, outputs))
        if not any(name in self.tensors for name, _ in named):
            return None
        fitting = iter([self._fitting(name, own) for name, own in named])
        leaves, structure = pytree.tree_flatten(outputs)
        return pytree.tree_unflatten(
            [next(fitting) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )

    def _fitting(self, name: str, own: Tensor) -> Tensor:
        new = self.tensors.get(name, own)
        if new.shape != own.shape:
            raise TensorCaptureError(f"{name!r} is {list(own.shape)}: a tensor of {list(new.shape)} cannot replace it")
        return new.to(own)


def enable_tensor_replacement(
    model: nn.Module, tensors: Mapping[str, Tensor] | TensorReplacementConfig
) -> TensorReplacementRegister:
    """Let modules return ``tensors`` instead of their own, in their dtype; returns the register, which ends it by
    ``remove()``. Raises TensorCaptureError for an unknown module, and in the call for a tensor of another shape."""
    register = TensorReplacementRegister(model)
    for name, tensor in (tensors.tensors if isinstance(tensors, TensorReplacementConfig) else tensors).items():
        register.register(name, tensor)
    return register
