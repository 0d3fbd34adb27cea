"""Tensors without their values, and what a unit of a pipeline gives for them: run on tensors that take no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nxd_infer.errors import NxdError
from nxd_infer.util.devices import transport_device

Like = Callable[[Tensor], Tensor]


def has_gradient(dtype: torch.dtype) -> bool:
    """Return whether values of ``dtype`` have gradients."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True)
class Shape:
    """A tensor without its values."""

    size: torch.Size
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Shape:
        return Shape(tensor.shape, tensor.dtype)

    def zeros(self) -> Tensor:
        """Zeros of this shape that take no memory."""
        return torch.zeros((), dtype=self.dtype, device=transport_device()).expand(self.size)

    def empty(self) -> Tensor:
        return torch.empty(self.size, dtype=self.dtype, device=transport_device())


def run_without_values(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    noted: Callable[[Tensor], object],
) -> tuple[Any, list[Tensor]]:
    """Run a unit's ``forward`` on the meta device; where something in it cannot run there, or under autocast, which the
    meta device does not have, on zeros.

    ``noted`` gets each tensor that takes the place of one that the unit is given or has. What the unit puts into its
    attributes, lists and dicts stays there: see :func:`unchanged`.

    Returns what the forward returns, and the tensors that it changes in place, as they were given.
    """
    cast = torch.is_autocast_enabled(transport_device().type)
    for like in (_zeros,) if cast else (_on_meta, _zeros):
        before, taken = _Held(module.modules()), _Places(like, noted)
        try:
            with torch.no_grad():
                taken.of_module(module)
                return forward(*taken.of(args), **taken.of(kwargs)), taken.changed()
        except NxdError:
            raise
        except Exception:
            before.restore()
            if like is _zeros:
                raise
        finally:
            taken.give_back()
    raise AssertionError


class _Places:
    """Puts tensors without values in the place of others; lists and dicts stay the same objects."""

    def __init__(self, like: Like, noted: Callable[[Tensor], object]):
        self._like, self._noted = like, noted
        self._made: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By id: a tensor, what takes its place, and the version of that. So tied weights stay tied."""
        self._filled: list[tuple[Any, Any, Tensor]] = []
        """(list or dict, place in it, tensor that was there)."""

    def of_module(self, module: nn.Module) -> None:
        for child in module.modules():
            for table in (child._parameters, child._buffers, child.__dict__):
                for name, value in list(table.items()):
                    if isinstance(value, Tensor):
                        self._put(table, name, value)

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._instead(value)
        if type(value) is tuple:
            return tuple(map(self.of, value))
        if type(value) in (list, dict):
            for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
                if isinstance(item, Tensor):
                    self._put(value, place, item)
                else:
                    value[place] = self.of(item)
            return value
        return tree_map(lambda leaf: self._instead(leaf) if isinstance(leaf, Tensor) else leaf, value)

    def _put(self, container: Any, place: Any, value: Tensor) -> None:
        self._filled.append((container, place, value))
        container[place] = self._instead(value)

    def _instead(self, value: Tensor) -> Tensor:
        if id(value) not in self._made:
            made = self._like(value)
            self._noted(made)
            self._made[id(value)] = (value, made, made._version)
        return self._made[id(value)][1]

    def changed(self) -> list[Tensor]:
        return [value for value, made, version in self._made.values() if made._version != version]

    def give_back(self) -> None:
        """Put back what is neither replaced nor changed: a later use of what is stays visible as one."""
        changed = {id(value) for value in self.changed()}
        for container, place, value in reversed(self._filled):
            there = place in container if isinstance(container, dict) else place < len(container)
            if there and container[place] is self._instead(value) and id(value) not in changed:
                container[place] = value


def _on_meta(value: Tensor) -> Tensor:
    return _as(value, torch.empty_like(value, device="meta"))


def _zeros(value: Tensor) -> Tensor:
    return _as(value, Shape.of(value).zeros())


def _as(value: Tensor, made: Tensor) -> Tensor:
    return nn.Parameter(made, False) if isinstance(value, nn.Parameter) else made


class _Held:
    """The attributes of modules as they are now, and what is in those that are lists and dicts."""

    def __init__(self, modules: Iterable[nn.Module]):
        containers = [one for module in modules for one in (module.__dict__, *module.__dict__.values())]
        self._before = [(one, one.copy()) for one in containers if type(one) in (dict, list)]

    def restore(self) -> None:
        for container, before in self._before:
            container.clear()
            container.update(before) if isinstance(container, dict) else container.extend(before)


@contextlib.contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules have the attributes after the block that they had before it."""
    before = _Held(modules)
    try:
        yield
    finally:
        before.restore()
