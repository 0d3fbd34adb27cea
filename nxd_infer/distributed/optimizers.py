"""Optimizers that are written down before the model is parallelized, and made after."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
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
        params = [_changed(entry, lambda one: mapping.get(id(one))) for entry in self.params]
        return self.optimizer_cls([entry for entry in params if entry is not None], *self.args, **self.kwargs)


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
        entries = [params] if isinstance(params, torch.Tensor) else params
        listed = [_changed(entry, lambda one: one) for entry in entries]  # a generator can be read once
        if not listed:
            raise ParallelConfigError(f"{optimizer_cls.__name__} was given an empty list of parameters")
        optimizer = optimizer_cls([_changed(entry, _placeholder) for entry in listed], *rest, **kwargs)
        setattr(optimizer, RECIPE, Recipe(optimizer_cls, listed, rest, kwargs))
        return optimizer

    return construct


def _placeholder(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(0, dtype=parameter.dtype))


def _changed(entry: Any, change: Callable[[Any], Any]) -> Any:
    """Return an entry of an optimizer's parameters with others in their places. What becomes None is left out, and of
    several in a group that become one, all but the first."""
    if isinstance(entry, dict):
        params = [entry["params"]] if isinstance(entry["params"], torch.Tensor) else entry["params"]
        changed = [_changed(one, change) for one in params]
        once = {id(one[1] if isinstance(one, tuple) else one): one for one in changed if one is not None}
        return {**entry, "params": list(once.values())}
    if isinstance(entry, tuple):
        parameter = change(entry[1])
        return None if parameter is None else (entry[0], parameter)
    return change(entry)


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
    known = inspect.signature(type(optimizer).__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return Recipe(type(optimizer), optimizer.param_groups, (), options).make(mapping)
