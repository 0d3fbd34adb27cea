"""Units: the modules that a pipeline may be cut between, and the stage that each belongs to.

A *cut* is the name of the last module of a stage. What contains a cut is opened: its own code runs on every stage, and
its children are units. Everything else is a unit as a whole, and runs on one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from nxd_infer.errors import ParallelConfigError
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
