"""A transparent module wrapper: parameters, modules, state dicts and unknown attributes are the inner module's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["ModelWrapper"]

Self = TypeVar("Self", bound="ModelWrapper")


class ModelWrapper(nn.Module):
    """Used like ``module``, with the same names.

    A derived class annotates its own attributes: they are the wrapper's, also if ``module`` has others of these names.
    """

    module: nn.Module

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module" or (name.startswith("__") and name.endswith("__")):
                raise  # how the inner module is copied is not how the wrapper is
            return getattr(super().__getattr__("module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        inner = vars(self).get("_modules", {}).get("module")
        own = inner is None or name == "module" or name in vars(self) or hasattr(type(self), name)
        if not own and not isinstance(value, nn.Module | nn.Parameter):
            own = _annotates(type(self), name) or not hasattr(inner, name)
        if own:
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    # --- this rank's tensors and modules, under the inner module's names --------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_modules(*args, **kwargs)

    def modules(self) -> Any:
        return self.module.modules()

    def named_children(self) -> Any:
        return self.module.named_children()

    def children(self) -> Any:
        return self.module.children()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self.module.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self.module.add_module(name, module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def apply(self: Self, fn: Callable[[nn.Module], None]) -> Self:
        self.module.apply(fn)
        return self

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.module._apply(fn, recurse)
        return self

    def train(self: Self, mode: bool = True) -> Self:
        self.training = mode
        self.module.train(mode)
        return self


def _annotates(kind: type, name: str) -> bool:
    return any(name in inspect.get_annotations(base) for base in kind.__mro__)
