"""Stand-ins: what is in the place of a module that another pipeline rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from nxd_infer.errors import ParallelConfigError

Self = TypeVar("Self", bound="StandIn")


class StandIn(nn.Module):
    """In the place of a module of another rank: it has no weights. Other attributes are those of the module, which also
    gets those that are set, and its mode."""

    hidden: nn.Module
    """The module on the meta device. Not a child, so that its weights are not this rank's."""

    def __init__(self, hidden: nn.Module):
        super().__init__()
        # Hooks see what a call gives, which is handed over.
        self._forward_hooks, self._forward_pre_hooks = hidden._forward_hooks, hidden._forward_pre_hooks
        self._forward_hooks_with_kwargs = hidden._forward_hooks_with_kwargs
        self._forward_pre_hooks_with_kwargs = hidden._forward_pre_hooks_with_kwargs
        self.__dict__["hidden"] = hidden

    def __getattr__(self, name: str) -> Any:
        if name == "hidden" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.hidden, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What calls go to is the stand-in's own: recomputed layers replace it.
        if "hidden" not in self.__dict__ or name in ("training", "forward"):
            super().__setattr__(name, value)
        else:
            setattr(self.hidden, name, value)

    def train(self: Self, mode: bool = True) -> Self:
        self.hidden.train(mode)
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ParallelConfigError(
            f"this {type(self.hidden).__name__} is on another pipeline stage: call run_train() or run_eval() of the "
            "model, on every rank"
        )

    def _apply(self: Self, fn: Any, recurse: bool = True) -> Self:
        # `Module.to(device)` rejects a tensor of the meta device: only the dtype that it wants is used.
        self.hidden._apply(lambda tensor: tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype), recurse)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.hidden).__name__} of another stage"


def hidden_of(module: nn.Module) -> nn.Module:
    """Return what a stand-in stands for; another module itself."""
    return module.hidden if isinstance(module, StandIn) else module


def modules_of_all(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the whole model, those behind stand-ins too, each once."""
    for child in module.modules():
        if isinstance(child, StandIn):
            yield from child.hidden.modules()
        else:
            yield child


def named_modules_of_all(module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield the modules of the whole model by all their names, and whether another rank holds it."""
    for path, child in module.named_modules(remove_duplicate=False):
        if not isinstance(child, StandIn):
            yield path, child, False
            continue
        for inner, hidden in child.hidden.named_modules(prefix=path, remove_duplicate=False):
            yield inner, hidden, True
