"""Pipeline stages: where a model is cut, by the names of its modules as in training, and the graphs of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import nn

from nxd_infer.errors import ParallelConfigError, TraceConfigError, TraceError
from nxd_infer.graph.canonical import Graph
from nxd_infer.graph.stages import split_stages
from nxd_infer.modules.transformer_layers import transformer_layers
from nxd_infer.pipeline.partition import auto_partition
from nxd_infer.pipeline.stage import find_units
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.ranks.traced import TracedRank
from nxd_infer.trace.request import TraceRequest


def stage_cuts(options: TraceOptions, module: nn.Module) -> list[str]:
    """Return the name of the last module of every stage but the last: the request's, or balanced ones.

    Raises TraceConfigError for cuts that do not fit the model, and for more stages than it has layers.
    """
    stages = options.pp_degree
    try:
        if options.pipeline_cuts is None:
            try:
                layers = transformer_layers(module)
            except ParallelConfigError as error:
                raise ParallelConfigError(
                    f"{type(module).__name__} has no list of layers (nn.ModuleList) to cut between: name the last "
                    "module of every stage but the last (pipeline_cuts); its modules are "
                    f"{', '.join(name for name, _ in module.named_children())}"
                ) from error
            cuts = auto_partition(module, layers, stages)
        else:
            cuts = list(options.pipeline_cuts)
        find_units(module, cuts)
    except ParallelConfigError as error:
        raise TraceConfigError(f"pp_degree={stages}: {error}") from error
    return cuts


def _weight_stages(module: nn.Module, cuts: Sequence[str]) -> Callable[[str], int | None]:
    """Return a function from the name of a weight to its stage: that of the module it belongs to. None for one that
    belongs to no stage (a constant, a table of positions)."""
    units = find_units(module, cuts)
    stages = {unit.path: unit.stage for unit in units.units}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    opened = dict(units.opened)

    def stage_of(name: str) -> int | None:
        path = name.rpartition(".")[0]
        inside = next((stage for unit, stage in stages.items() if path == unit or path.startswith(f"{unit}.")), None)
        if inside is None and name in parameters:
            return opened.get(path)
        return inside

    return stage_of


def split_rank(
    request: TraceRequest, traced: TracedRank, whole: list[Graph]
) -> Iterator[tuple[TracedRank, list[Graph]]]:
    """Yield each pipeline stage and its graphs. A weight that several stages read is a weight of its own in each."""
    module = traced.built[0].module
    stage_of = _weight_stages(module, stage_cuts(request.options, module))
    count = request.options.pp_degree
    split = []
    for bucket, graph in zip(request.buckets, whole, strict=True):
        try:
            split.append(split_stages(graph, lambda name: stage_of(traced.origin[name][1]), count))
        except TraceError as error:
            error.args = (f"bucket {bucket.name!r}: {error.args[0]}",)
            raise
    owners: dict[str, int] = {}
    for number in range(count):
        stage = TracedRank(stage=number, built=traced.built, constants=traced.constants)
        graphs = [staged.graphs[number] for staged in split]
        for bucket, staged, graph in zip(traced.buckets, split, graphs, strict=True):
            stage.buckets.append(bucket.model_copy(update={"stages": [staged.stages[number]], "handed": staged.handed}))
            stage.states.update((spec.name, traced.states[spec.name]) for spec in graph.file.states)
            for spec in graph.file.weights:
                first = owners.setdefault(spec.name, number) == number
                name = spec.name if first else f"{spec.name}@stage_{number}"
                stage.origin[name] = traced.origin[spec.name]
                stage.weights[name] = traced.weights[spec.name].model_copy(update={"name": name})
                spec.name = name
        yield stage, graphs


def require_one_rounding(request: TraceRequest, stages: list[TracedRank]) -> None:
    """Check that a weight of several stages has the same values in all of them, as it has without a pipeline."""
    forms = {form.encoding for form in request.backend.quantizations.values()}
    rounded = [
        {stage.origin[spec.name] for spec in stage.weights.values() if spec.encoding in forms} for stage in stages
    ]
    for stage, own in zip(stages, rounded, strict=True):
        for name, origin in stage.origin.items():
            if origin not in own and any(origin in other for other in rounded):
                raise TraceConfigError(
                    f"quantize: {name!r} is a table in one pipeline stage and the matrix of a linear layer in another, "
                    "and only the matrix would be rounded: trace with pp_degree=1, or without quantize"
                )
