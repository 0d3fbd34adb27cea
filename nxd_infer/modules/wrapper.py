"""A transparent module wrapper: parameters, modules, state dicts and unknown attributes are the inner module's."""

from __future__ import annotations

import functools
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


def _of_module(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Module, name))
    def call(self: ModelWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    return call


# This rank's tensors and modules, under the inner module's names.
for _name in (
    *("named_parameters", "parameters", "named_buffers", "buffers"),
    *("named_modules", "modules", "named_children", "children"),
    *("register_parameter", "register_buffer", "add_module", "state_dict", "load_state_dict"),
):
    setattr(ModelWrapper, _name, _of_module(_name))


def _annotates(kind: type, name: str) -> bool:
    return any(name in inspect.get_annotations(base) for base in kind.__mro__)
