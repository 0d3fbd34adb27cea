"""Replace what modules return by given tensors, to find the module in which two models part::

    TensorReplacementRegister(model, {"layers.0.mlp": expected})     # names as tensor_capture gives them

A traced model has the tensors of the time of its trace as constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nxd_infer.modules.tensor_capture import TensorCaptureError, module_named, named_tensors


@dataclass
class TensorReplacementConfig:
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class TensorReplacementRegister:
    """The tensors that modules return instead of their own, in their dtype; they may change between calls.

    Raises TensorCaptureError for an unknown module, and in a call for a tensor of another shape.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Tensor] | TensorReplacementConfig | None = None):
        self.model = model
        self.tensors: dict[str, Tensor] = {}
        modules = list(model.named_modules())
        # The first of all hooks: others see what the model computes with.
        self._hooks = [
            module.register_forward_hook(partial(self._replace, path), prepend=True) for path, module in modules
        ]
        given = config.tensors if isinstance(config, TensorReplacementConfig) else config or {}
        for name, tensor in given.items():
            self.register(name, tensor)

    def register(self, name: str, tensor: Tensor) -> None:
        path, _, place = name.rpartition(".")
        module_named(self.model, path if place.isdigit() and name not in dict(self.model.named_modules()) else name)
        self.tensors[name] = tensor

    def clear(self) -> None:
        self.tensors.clear()

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _replace(self, path: str, module: nn.Module, arguments: Any, outputs: Any) -> Any:
        fitting = iter([self._fitting(name, own) for name, own in named_tensors(path, outputs)])
        return pytree.tree_map_only(Tensor, lambda _: next(fitting), outputs)

    def _fitting(self, name: str, own: Tensor) -> Tensor:
        new = self.tensors.get(name, own)
        if new.shape != own.shape:
            raise TensorCaptureError(f"{name!r} is {list(own.shape)}: a tensor of {list(new.shape)} cannot replace it")
        return new.to(own)
