"""One rank's part of a model: its stages' modules, with stand-ins where the other stages' modules were.

A *unit* is a module that a pipeline may be cut between. A *cut* is the name of the last module of a stage. What
contains a cut is opened: its own code runs on every stage, and its children are units. Everything else is a unit as a
whole, and runs on one stage.

The names of what stays are those of the whole model. A *weight* is a parameter or a buffer of a unit, or of what
contains units; the rank of the first stage that has it owns it. A weight that another rank needs as well (a tied one)
is *lent* to it while a step runs: see :mod:`nxd_infer.pipeline.engine`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import ParamLayout, weight_layout
from nxd_infer.layout.params import restore_attributes
from nxd_infer.modules.stand_in import StandIn, hidden_of
from nxd_infer.util.suggest import did_you_mean


@dataclass(frozen=True)
class Unit:
    """A module that runs on one stage."""

    path: str
    """Its first name in the model."""
    stage: int


@dataclass(frozen=True)
class Units:
    """The units of a model in the order of their definition, which is that of the stages."""

    units: tuple[Unit, ...]
    opened: tuple[tuple[str, int], ...]
    """What contains cuts, with the stage that owns its parameters: that of its first unit."""
    cuts: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]
    """Further names of a unit that is in the model several times, and its first name."""

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1


def bound_to_stage(module: nn.Module) -> bool:
    """Return whether a module has weights, so that one stage has it. Others (dropout, rotary tables) run on all."""
    return any(True for _ in module.parameters()) or any(
        name not in child._non_persistent_buffers_set for child in module.modules() for name in child._buffers
    )


def find_units(model: nn.Module, cuts: Sequence[str]) -> Units:
    """Return the units of ``model`` for ``len(cuts) + 1`` stages.

    Raises ParallelConfigError for a cut that is not in the model (naming the nearest), that is there twice, that lies
    inside another, or that is not in the order of definition, and for a model of one layer.
    """
    names = dict(model.named_modules(remove_duplicate=False))
    for cut in cuts:
        if not cut or cut not in names:
            known = [name for name in names if name]
            raise ParallelConfigError(
                f"pipeline_cuts: the model has no module {cut!r}{did_you_mean(str(cut), known) or _some(known)}"
            )
    if len(set(cuts)) < len(cuts):
        raise ParallelConfigError(f"pipeline_cuts: each cut ends one stage, but one is there twice: {list(cuts)}")
    inside = {cut.rpartition(".")[0] for cut in cuts}
    opened = {""}
    for path in inside:
        parts = path.split(".")
        opened |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    nested = [cut for cut in cuts if cut in opened]
    if nested:
        raise ParallelConfigError(
            f"pipeline_cuts: {nested[0]!r} contains another cut; a stage ends after a whole module"
        )
    found: list[tuple[str, nn.Module]] = []
    aliases: list[tuple[str, str]] = []
    containers: list[tuple[str, int]] = []
    first_name: dict[int, str] = {}

    def walk(path: str, module: nn.Module) -> None:
        containers.append((path, len(found)))
        for name, child in module.named_children():
            here = f"{path}.{name}" if path else name
            if here in opened:
                walk(here, child)
            elif bound_to_stage(child):
                if id(child) in first_name:
                    aliases.append((here, first_name[id(child)]))
                else:
                    first_name[id(child)] = here
                    found.append((here, child))

    walk("", model)
    if not found:
        raise ParallelConfigError(
            f"{type(model).__name__} has no module with weights inside, and a stage consists of such modules: wrap it "
            "in a model that calls it"
        )
    order = [path for path, _ in found]
    positions = [order.index(cut) if cut in order else -1 for cut in cuts]
    if -1 in positions:
        raise ParallelConfigError(
            f"pipeline_cuts: {cuts[positions.index(-1)]!r} has no weights; a stage ends after a layer"
        )
    if positions != sorted(positions):
        raise ParallelConfigError(
            f"pipeline_cuts: {list(cuts)} are not in the order of the model, which is "
            f"{[order[position] for position in sorted(positions)]}"
        )
    if positions and positions[-1] == len(order) - 1:
        raise ParallelConfigError(f"pipeline_cuts: nothing comes after {cuts[-1]!r}, so the last stage would be empty")
    stage_of = [sum(position > cut for cut in positions) for position in range(len(order))]
    return Units(
        tuple(Unit(path, stage) for path, stage in zip(order, stage_of, strict=True)),
        tuple((path, stage_of[min(position, len(order) - 1)]) for path, position in containers),
        tuple(cuts),
        tuple(aliases),
    )


def _some(names: Sequence[str]) -> str:
    return f"; it has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"


@dataclass(frozen=True)
class Weight:
    """A weight of the whole model."""

    name: str
    """Its first name."""
    shape: torch.Size
    dtype: torch.dtype
    stage: int
    parameter: bool
    places: tuple[tuple[str, str], ...]
    """(path of a module, attribute) of all its names."""


@dataclass
class Stage:
    """What :func:`take_stage` leaves of a model on a rank."""

    module: nn.Module
    units: Units
    rank: int
    ranks: int
    weights: dict[str, Weight]
    """Of the whole model, by first name."""
    layouts: dict[str, ParamLayout]
    """Of the whole model: the names and layouts that its checkpoints have."""

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def owns(self, weight: Weight) -> bool:
        return self.rank_of(weight.stage) == self.rank

    def find(self, path: str) -> nn.Module:
        """Return the module at ``path`` of the whole model: this rank's, or the hidden one of a stand-in."""
        found = self.module
        for part in path.split(".") if path else ():
            found = hidden_of(found.get_submodule(part))
        return found

    def change_others(self, change: Callable[[nn.Module], object]) -> None:
        """Do to the modules of other ranks, which have no memory here, what was done to this rank's."""
        hidden = {id(one.hidden): one.hidden for one in self.module.modules() if isinstance(one, StandIn)}
        for module in hidden.values():
            change(module)
        shapes = {
            name: getattr(self.find(one.places[0][0]), one.places[0][1]).shape for name, one in self.weights.items()
        }
        self.weights = {name: replace(one, shape=shapes[name]) for name, one in self.weights.items()}

    def unit_modules(self) -> dict[str, nn.Module]:
        """Return the modules to call for the units, by path: this rank's, and stand-ins."""
        return {unit.path: self.module.get_submodule(unit.path) for unit in self.units.units}

    def foreign(self) -> list[Weight]:
        """Return the weights that other ranks own."""
        return [weight for weight in self.weights.values() if not self.owns(weight)]

    def elsewhere(self, names: Iterable[str]) -> set[str]:
        """Return which tensors of the whole model, under their names in a checkpoint, are other ranks'."""
        foreign = {".".join(filter(None, place)) for one in self.foreign() for place in one.places}
        stages = {unit.path: unit.stage for unit in self.units.units}
        stages |= {path: stages[first] for path, first in self.units.aliases}
        others = tuple(f"{path}." for path, stage in stages.items() if self.rank_of(stage) != self.rank)
        return {name for name in names if name in foreign or name.startswith(others)}

    def saves(self, name: str) -> bool:
        """Return whether this rank saves a tensor that it has; buffers of what contains units are on all ranks."""
        paths = [unit.path for unit in self.units.units] + [path for path, _ in self.units.aliases]
        return self.rank == 0 or name in self.weights or any(name.startswith(f"{path}.") for path in paths)

    def own(self, name: str) -> Tensor:
        """Return a weight of this rank; after LoRA wrapped its layer, the wrapped layer's."""
        path, attribute = self.weights[name].places[0]
        holder = self.find(path)
        found = getattr(holder, attribute, None)
        return found if isinstance(found, Tensor) else getattr(holder.base_layer, attribute)


def take_stage(model: nn.Module, cuts: Iterable[str], rank: int, ranks: int) -> Stage:
    """Reduce ``model``, in place, to what ``rank`` of ``ranks`` holds. Modules of other ranks are freed.

    Raises ParallelConfigError for cuts that do not fit; see :func:`~nxd_infer.pipeline.stage.find_units`.
    """
    units = find_units(model, list(cuts))
    if units.stages % ranks:
        raise ParallelConfigError(
            f"{len(units.cuts)} pipeline_cuts make {units.stages} stages, which {ranks} pipeline ranks cannot share "
            f"equally: give {ranks - 1} cuts, or with virtual_pipeline_size=v {ranks} x v - 1"
        )
    weights = find_weights(model, units)
    stage = Stage(model, units, rank, ranks, weights, weight_layout(model))
    tensors = [getattr(model.get_submodule(path), name) for path, name in (one.places[0] for one in weights.values())]
    meta = {id(tensor): _on_meta(tensor) for tensor in tensors}
    shown: dict[str, StandIn] = {}
    for unit in units.units:
        if stage.rank_of(unit.stage) != rank:
            # A copy whose weights are on the meta device: a module of this rank may contain the same objects.
            shown[unit.path] = StandIn(copy.deepcopy(model.get_submodule(unit.path), dict(meta)))
            restore_attributes(shown[unit.path].hidden)
    for path, first in [*((path, path) for path in shown), *units.aliases]:
        if first in shown:
            parent, _, name = path.rpartition(".")
            model.get_submodule(parent)._modules[name] = shown[first]
    own = set(model.modules())
    for weight in stage.foreign():
        for path, name in weight.places:
            if (holder := stage.find(path)) in own:
                (holder._parameters if weight.parameter else holder._buffers)[name] = None
    return stage


def find_weights(model: nn.Module, units: Units) -> dict[str, Weight]:
    """Return all weights of the units and of what contains them, by first name."""
    # Buffers of what contains units are on every stage, where its code runs.
    tables = [(path, stage, model.get_submodule(path)._parameters) for path, stage in units.opened]
    for unit in units.units:
        inner = model.get_submodule(unit.path).named_modules(prefix=unit.path, remove_duplicate=False)
        for path, module in inner:
            tables += [(path, unit.stage, module._parameters), (path, unit.stage, module._buffers)]
    found: dict[int, tuple[Tensor, int, list[tuple[str, str]]]] = {}
    for path, stage, table in tables:
        for name, tensor in table.items():
            if tensor is not None:
                found.setdefault(id(tensor), (tensor, stage, []))[2].append((path, name))
    weights = {}
    for tensor, stage, places in found.values():
        name = ".".join(filter(None, places[0]))
        parameter = isinstance(tensor, nn.Parameter)
        weights[name] = Weight(name, tensor.shape, tensor.dtype, stage, parameter, tuple(places))
    return weights


def _on_meta(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """Return what a call of ``module`` runs now, after its hooks; of a stand-in, of the module behind it."""
    module = hidden_of(module)
    return module.__dict__.get("forward") or functools.partial(type(module).forward, module)


@contextlib.contextmanager
def shadowed(places: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Let attributes of modules, weights too, be other ones inside the block."""
    outside: list[tuple[dict[str, Any], str, bool, Any]] = []
    try:
        for module, name, value in places:
            tables = (module._parameters, module._buffers)
            table = next((table for table in tables if name in table), module.__dict__)
            outside.append((table, name, name in table, table.get(name)))
            table[name] = value
        yield
    finally:
        for table, name, was_there, before in reversed(outside):
            if was_there:
                table[name] = before
            else:
                table.pop(name, None)


@contextlib.contextmanager
def calling(forwards: Mapping[nn.Module, Any]) -> Iterator[None]:
    """Let calls of modules go to other functions inside the block."""
    with shadowed((module, "forward", forward) for module, forward in forwards.items()):
        yield
