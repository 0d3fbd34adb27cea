"""Replace what modules return by given tensors, to find the module in which two models part."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nxd_infer.modules.tensor_capture import TensorCaptureError, module_named, named_tensors


class TensorReplacementRegister:
    """Lets modules of ``model`` return ``tensors`` (by names as tensor_capture gives them), in their own dtype.

    The values may change between calls; a traced model has those of its trace as constants. Raises TensorCaptureError
    for an unknown module, and in a call for a tensor of another shape.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]):
        self.tensors, modules = dict(tensors), dict(model.named_modules())
        self._hooks = []
        for name in self.tensors:
            path = name if name in modules else name.rpartition(".")[0] or name  # or it is one of several tensors
            hook = partial(self._replace, path)  # before others, which see what is computed with
            self._hooks.append(module_named(model, path).register_forward_hook(hook, prepend=True))

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
