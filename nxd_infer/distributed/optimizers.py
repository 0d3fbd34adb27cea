"""Optimizers that are written down before the model is parallelized, and made after."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nxd_infer.errors import ParallelConfigError

RECIPE = "_nxd_recipe"
"""Attribute of an optimizer of a lazy constructor: its :class:`Recipe`."""


class ParameterMap(Mapping[int, nn.Parameter]):
    """Maps the ``id`` of each parameter of a model, from before it was parallelized, to this rank's parameter.

    Parameters of other pipeline stages are not in it.
    """

    def __init__(self, before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]):
        # The id of a parameter that is gone may become that of another, which then is not the one meant here.
        self._found = {id(p): (weakref.ref(p), after[name]) for name, p in before.items() if name in after}

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterMap:
        made = ParameterMap({}, {})
        made._found = copy.deepcopy(self._found, memo)
        return made

    def __reduce__(self) -> Any:
        return ParameterMap, ({}, {})  # ids mean nothing in another process

    def __getitem__(self, number: int) -> nn.Parameter:
        reference, parameter = self._found[number]
        if reference() is None:
            raise KeyError(number)
        return parameter

    def __iter__(self) -> Iterator[int]:
        return (number for number, (reference, _) in self._found.items() if reference() is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Recipe:
    """The call of an optimizer's constructor, with iterators made lists."""

    optimizer_cls: type[torch.optim.Optimizer]
    params: list[Any]
    """Parameters, ``(name, parameter)`` pairs, or groups whose ``"params"`` are such lists."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self, mapping: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
        """Call the constructor with the parameters' counterparts; those that the mapping lacks are left out."""
        params = [_mapped(entry, mapping) for entry in self.params]
        params = [entry for entry in params if entry is not None]
        return self.optimizer_cls(params, *self.args, **self.kwargs)


def make_optimizer_constructor_lazy(optimizer_cls: type[torch.optim.Optimizer]) -> Any:
    """Return a constructor of optimizers without parameters, which ``Parallelizer.optimizer_for_mp`` makes real ones.

    It takes what ``optimizer_cls`` takes: parameters as a list, groups, a generator or ``(name, parameter)`` pairs,
    first or as ``params=``. What it returns is an ``optimizer_cls`` of the same groups and options, over placeholders
    without elements.
    """

    def construct(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if not args and "params" not in kwargs:
            raise ParallelConfigError(f"{optimizer_cls.__name__} needs the parameters, first or as params=")
        kwargs = dict(kwargs)
        params, rest = (kwargs.pop("params"), args) if "params" in kwargs else (args[0], args[1:])
        listed = [_listed(entry) for entry in ([params] if isinstance(params, torch.Tensor) else params)]
        if not listed:
            raise ParallelConfigError(f"{optimizer_cls.__name__} was given an empty list of parameters")
        optimizer = optimizer_cls([_placeholder(entry) for entry in listed], *rest, **kwargs)
        setattr(optimizer, RECIPE, Recipe(optimizer_cls, listed, rest, kwargs))
        return optimizer

    return construct


def _listed(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    params = entry["params"]
    return {**entry, "params": [params] if isinstance(params, torch.Tensor) else list(params)}


def _placeholder(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {**entry, "params": [_placeholder(one) for one in entry["params"]]}
    if isinstance(entry, tuple):
        return entry[0], _placeholder(entry[1])
    return nn.Parameter(torch.empty(0, dtype=entry.dtype))


def _mapped(entry: Any, mapping: Mapping[int, nn.Parameter]) -> Any:
    """Return the entry with each parameter's counterpart, or None for a parameter that has none."""
    if isinstance(entry, dict):
        found = [_mapped(one, mapping) for one in entry["params"]]
        return {**entry, "params": _once(one for one in found if one is not None)}
    if isinstance(entry, tuple):
        counterpart = mapping.get(id(entry[1]))
        return None if counterpart is None else (entry[0], counterpart)
    return mapping.get(id(entry))


def _once(params: Iterable[Any]) -> list[Any]:
    """Drop repetitions: several parameters may have become one."""
    return list({id(one[1] if isinstance(one, tuple) else one): one for one in params}.values())


def optimizer_for(optimizer: torch.optim.Optimizer, mapping: Mapping[int, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer for the parallelized parameters; see ``Parallelizer.optimizer_for_mp``."""
    recipe: Recipe | None = getattr(optimizer, RECIPE, None)
    if recipe is not None:
        made = recipe.make(mapping)
        if not any(group["params"] for group in made.param_groups):
            raise ParallelConfigError(
                "none of the optimizer's parameters is in the mapping; pass parameter_mapping(model) of the model that "
                "it was made for"
            )
        return made
    before = [param for group in optimizer.param_groups for param in group["params"]]
    if all(mapping.get(id(param), param) is param for param in before):
        return optimizer
    if optimizer.state:
        raise ParallelConfigError(
            f"{type(optimizer).__name__} has the state of steps with the whole parameters: make the optimizer, and "
            "parallelize the model, before the first step"
        )
    groups = [
        {**group, "params": _once(mapping[id(one)] for one in group["params"] if id(one) in mapping)}
        for group in optimizer.param_groups
    ]
    known = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return type(optimizer)(groups, **options)
