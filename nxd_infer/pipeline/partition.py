"""Cuts that balance a pipeline, and what a partition costs each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.embedding import ParallelEmbedding
from nxd_infer.pipeline.stage import find_units


@dataclass(frozen=True)
class StageCost:
    """A stage: its first and last unit, the bytes of its weights, and its work for a token."""

    first: str
    last: str
    units: int
    bytes: int
    cost: float
    """Multiplications a token: the elements of its matrices."""


def balanced(costs: Sequence[float], may_end: Sequence[bool], stages: int) -> list[int]:
    """Return after which positions to cut a sequence so that the largest sum of a stage is smallest.

    ``may_end[i]``: whether a stage may end after position ``i``. Among equal partitions, that with the smallest sum of
    squares. Raises ParallelConfigError with too few such positions.
    """
    ends = [position for position, may in enumerate(may_end[:-1]) if may]
    if len(ends) < stages - 1:
        raise ParallelConfigError(
            f"{stages} pipeline stages need {stages - 1} cuts, but there are {len(ends)} layers to cut after; use at "
            f"most {len(ends) + 1} stages (pipeline_parallel_size x virtual_pipeline_size)"
        )
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[end]: (largest stage, sum of squares, cuts) for what comes up to and with `end`, in as many stages as rounds.
    best = {end: (total[end + 1], total[end + 1] ** 2, ()) for end in ends}
    last = len(costs) - 1
    for number in range(1, stages):
        candidates = [last] if number == stages - 1 else ends
        found = {}
        for end in candidates:
            options = [
                (
                    max(top, total[end + 1] - total[cut + 1]),
                    squares + (total[end + 1] - total[cut + 1]) ** 2,
                    (*cuts, cut),
                )
                for cut, (top, squares, cuts) in best.items()
                if cut < end
            ]
            if options:
                found[end] = min(options)
        best = found
    return list(best[last][2]) if stages > 1 else []


def unit_cost(module: nn.Module) -> float:
    """Return the multiplications a token of a unit: the elements of its matrices; an embedding looks one row up."""
    seen: set[int] = set()
    cost = 0.0
    for child in module.modules():
        if isinstance(child, nn.Embedding | ParallelEmbedding):
            continue
        for parameter in child._parameters.values():
            if parameter is not None and parameter.dim() > 1 and id(parameter) not in seen:
                seen.add(id(parameter))
                cost += parameter.numel()
    return cost


def auto_partition(model: nn.Module, layers: Sequence[nn.Module], stages: int) -> list[str]:
    """Return cuts, each the name of one of ``layers``, for ``stages`` stages of nearly equal cost.

    The head counts with its matrix, an embedding with nothing, and a head that is tied to it as a head.
    Raises ParallelConfigError for more stages than the layers allow.
    """
    if stages == 1:
        return []
    chosen = {id(layer) for layer in layers}
    # A layer that lies inside another is part of it.
    names = [name for name, module in model.named_modules() if id(module) in chosen]
    names = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    if len(names) < stages:
        raise ParallelConfigError(
            f"{stages} pipeline stages, but the model has {len(names)} transformer layers: use at most {len(names)} "
            "(pipeline_parallel_size x virtual_pipeline_size)"
        )
    units = [unit.path for unit in find_units(model, names[:-1]).units]
    costs = [unit_cost(model.get_submodule(path)) for path in units]
    costs[-1] += tied_head_cost(model)
    ends = balanced(costs, [path in names for path in units], stages)
    return [units[end] for end in ends]


def tied_head_cost(model: nn.Module) -> float:
    """Return the cost of a head that is the embedding itself, without a module of its own."""
    config: Any = getattr(model, "config", None)
    tied = getattr(config, "tied", None)
    if not tied:
        return 0.0
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding | ParallelEmbedding))
    return float(max((m.weight.numel() for m in embeddings), default=0))


def describe_partition(model: nn.Module, cuts: Sequence[str]) -> list[StageCost]:
    """Return what each stage costs. A weight of several stages counts where it is first."""
    units = find_units(model, cuts)
    seen: set[int] = set()
    found = []
    for stage in range(units.stages):
        paths = [unit.path for unit in units.units if unit.stage == stage]
        modules = [model.get_submodule(path) for path in paths]
        size = 0
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    size += tensor.numel() * tensor.element_size()
        cost = sum(map(unit_cost, modules)) + (tied_head_cost(model) if stage == units.stages - 1 else 0.0)
        found.append(StageCost(paths[0], paths[-1], len(paths), size, cost))
    return found


def imbalance(costs: Sequence[StageCost]) -> float:
    """Return how much longer the most expensive stage works than one of an equal share: 0 is balanced."""
    mean = sum(stage.cost for stage in costs) / len(costs)
    return max(stage.cost for stage in costs) / mean - 1 if mean else 0.0
