"""Which pipeline stage each weight of a checkpoint belongs to, by its name alone: there is no model to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nxd_infer.errors import ParallelConfigError
from nxd_infer.pipeline.partition import balanced
from nxd_infer.util.suggest import did_you_mean


def stages_of(costs: Mapping[str, int], stages: int, cuts: Sequence[str] | None = None) -> dict[str, int]:
    """Return the stage of each weight, by name.

    ``costs``: the elements of each matrix and 0 for other weights, nearly in the order of the model: a rank of an
    interleaved pipeline saves every other stage. A layer is what ``model.layers.5.`` begins. ``cuts`` are the last
    layers of all stages but the last one; without them stages cost about the same, as with ``auto_partition``: what
    comes before the first layer is looked up, so it costs nothing.

    Raises ParallelConfigError for more stages than layers, and for cuts that are no layers or not in their order.
    """
    layers = _in_order(costs)
    names = list(layers)
    numbered = [name.rpartition(".")[2].isdigit() for name in names]
    if cuts is None:
        first = numbered.index(True) if any(numbered) else len(names)
        work = [float(sum(costs[one] for one in layers[name])) * (at >= first) for at, name in enumerate(names)]
        ends = balanced(work, numbered, stages)
    else:
        known = [name for name, layer in zip(names, numbered, strict=True) if layer]
        if len(cuts) != stages - 1:
            raise ParallelConfigError(f"{stages} pipeline stages need {stages - 1} cuts, got {len(cuts)}: {list(cuts)}")
        for cut in cuts:
            if cut not in known:
                raise ParallelConfigError(f"the checkpoint has no layer {cut!r}{did_you_mean(cut, known)}")
        ends = [names.index(cut) for cut in cuts]
        if ends != sorted(set(ends)):
            raise ParallelConfigError(f"the cuts {list(cuts)} are not in the order of the layers")
    return {weight: sum(end < place for end in ends) for place, name in enumerate(names) for weight in layers[name]}


def _in_order(weights: Mapping[str, int]) -> dict[str, list[str]]:
    """The weights by layer; layers that are numbered in one list are in the order of their numbers."""
    layers: dict[str, list[str]] = {}
    first_of: dict[str, int] = {}
    for place, weight in enumerate(weights):
        layer = _layer(weight)
        layers.setdefault(layer, []).append(weight)
        first_of.setdefault(layer.rpartition(".")[0] if layer != weight else layer, place)

    def key(layer: str) -> tuple[int, int]:
        several, _, number = layer.rpartition(".")
        return (first_of[several], int(number)) if several in first_of and number.isdigit() else (first_of[layer], 0)

    return {layer: layers[layer] for layer in sorted(layers, key=key)}


def _layer(weight: str) -> str:
    parts = weight.split(".")
    number = next((place for place, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: number + 1])
