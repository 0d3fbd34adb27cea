"""Capture what modules return, by their names: in eager mode, and as further outputs of a traced model. Or replace it,
to find the module in which two models part.

::

    model = enable_tensor_capture(model, ["layers.0.mlp", "norm"])
    model(x)
    get_captured_tensors_dict()                 # {"layers.0.mlp": ..., "norm": ...} of the last call

A traced model returns them if its forward does, or with ``enable_tensor_capture(..., returned=True)``. A module that
returns several tensors has the names ``layers.0.0``, ``layers.0.1``; a second call in one pass is ``layers.0@1``.
Ranks capture what they hold: of a split tensor, a traced model returns the first rank's piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from nxd_infer.errors import NxdError
from nxd_infer.util.suggest import nearest


class TensorCaptureError(NxdError, ValueError):
    """A module that the model does not have, or a tensor that does not fit."""


@dataclass
class TensorCaptureConfig:
    modules_to_capture: Sequence[str] = ()
    max_intermediate_tensors: int | None = None
    """At most that many, the first of a call; None: all."""
    capture_inputs: bool = False
    """Also the tensors that the modules are given by position, as ``norm.inputs``."""


class _Capture:
    def __init__(self, most: int | None = 0):
        self.most = most
        self.tensors: dict[str, Tensor] = {}
        self.calls: Counter[str] = Counter()
        self.hooks: list[RemovableHandle] = []

    def clear(self, *_: Any) -> None:
        self.tensors.clear()
        self.calls.clear()

    def add(self, name: str, value: Any) -> None:
        call = self.calls[name]
        self.calls[name] += 1
        for key, tensor in named_tensors(f"{name}@{call}" if call else name, value):
            if self.most is None or len(self.tensors) < self.most:
                self.tensors[key] = tensor


_current = _Capture()
"""Before the first is enabled, and after one is disabled, it captures nothing."""


def enable_tensor_capture(
    model: nn.Module,
    modules_to_capture: Sequence[str] | TensorCaptureConfig,
    max_tensors: int | None = None,
    capture_inputs: bool = False,
    *,
    returned: bool = False,
) -> nn.Module:
    """Capture in every call of ``model`` what the named modules return; returns ``model``. Ends an earlier capture.

    ``returned``: the model returns ``(outputs, captured)``. Raises TensorCaptureError for an unknown module.
    """
    global _current
    config = modules_to_capture
    if not isinstance(config, TensorCaptureConfig):
        config = TensorCaptureConfig(config, max_tensors, capture_inputs)
    modules = {path: module_named(model, path) for path in config.modules_to_capture}
    disable_tensor_capture()
    _current = _Capture(config.max_intermediate_tensors)
    _current.hooks.append(model.register_forward_pre_hook(_current.clear))
    for path, module in modules.items():
        if config.capture_inputs:
            _current.hooks.append(module.register_forward_pre_hook(partial(_seen, f"{path}.inputs")))
        _current.hooks.append(module.register_forward_hook(partial(_seen, path)))
    if returned:
        _current.hooks.append(model.register_forward_hook(lambda *seen: (seen[-1], get_captured_tensors_dict())))
    return model


def _seen(name: str, *seen: Any) -> None:
    register_tensor(name, seen[-1])


def disable_tensor_capture(model: nn.Module | None = None) -> nn.Module | None:
    """End the capture, and forget what was captured; returns ``model``."""
    global _current
    for hook in _current.hooks:
        hook.remove()
    _current = _Capture()
    return model


def register_tensor(name: str, tensor: Any) -> None:
    """Capture a tensor, or those in a list or dictionary, under a name of your own, from inside of a forward."""
    _current.add(name, tensor)


def get_captured_tensors_dict() -> dict[str, Tensor]:
    """Return what the last call, or the present one, has captured so far, by name, in the order of the calls."""
    return dict(_current.tensors)


def get_captured_tensors() -> list[Tensor]:
    return list(_current.tensors.values())


def get_available_modules(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules() if path]


def module_named(model: nn.Module, path: str) -> nn.Module:
    """Return a module by its name. Raises TensorCaptureError with the nearest one."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        known = nearest(path, get_available_modules(model))
        raise TensorCaptureError(f"the model has no module {path!r}{known}") from None


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's result, with their names."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    for place, tensor in enumerate(tensors):
        yield name if len(tensors) == 1 else f"{name}.{place}", tensor


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
