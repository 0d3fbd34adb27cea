"""Split the graphs of one rank into those of its pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator

from nxd_infer.backends import registry
from nxd_infer.errors import TraceConfigError, TraceError
from nxd_infer.graph.canonical import Graph
from nxd_infer.graph.stages import split_stages
from nxd_infer.trace.cuts import stage_cuts, weight_stages
from nxd_infer.trace.ranks.rank_graphs import RankGraphs
from nxd_infer.trace.request import TraceRequest


def split_rank(
    request: TraceRequest, graphs: RankGraphs, traced: list[Graph]
) -> Iterator[tuple[RankGraphs, list[Graph]]]:
    """Yield the graphs of each pipeline stage. A weight that several stages read is a weight of its own in each."""
    stage_of = weight_stages(graphs.built[0].module, stage_cuts(request, graphs.built[0].module))
    split = []
    for bucket, graph in zip(request.buckets, traced, strict=True):
        try:
            split.append(split_stages(graph, lambda name: stage_of(graphs.origin[name][1]), request.pp_degree))
        except TraceError as error:
            error.args = (f"bucket {bucket.name!r}: {error.args[0]}",)
            raise
    owners: dict[str, int] = {}
    for number in range(request.pp_degree):
        mine = RankGraphs(graphs.built, graphs.constants, stage=number)
        parts = [staged.graphs[number] for staged in split]
        for bucket, staged, part in zip(graphs.buckets, split, parts, strict=True):
            mine.buckets.append(bucket.model_copy(update={"stage": staged.stages[number], "handed": staged.handed}))
            mine.states.update((spec.name, graphs.states[spec.name]) for spec in part.file.states)
            for spec in part.file.weights:
                first = owners.setdefault(spec.name, number) == number
                name = spec.name if first else f"{spec.name}@stage_{number}"
                mine.origin[name] = graphs.origin[spec.name]
                mine.weights[name] = graphs.weights[spec.name].model_copy(update={"name": name})
                spec.name = name
        yield mine, parts


def require_one_rounding(request: TraceRequest, stages: list[RankGraphs]) -> None:
    """Check that a weight of several stages has the same values in all of them, as it has without a pipeline."""
    forms = {form.encoding for form in registry.get(request.backend).quantizations.values()}
    rounded = [
        {graphs.origin[spec.name] for spec in graphs.weights.values() if spec.encoding in forms} for graphs in stages
    ]
    for graphs, own in zip(stages, rounded, strict=True):
        for name, origin in graphs.origin.items():
            if origin not in own and any(origin in other for other in rounded):
                raise TraceConfigError(
                    f"quantize: {name!r} is a table in one pipeline stage and the matrix of a linear layer in another, "
                    "and only the matrix would be rounded: trace with pp_degree=1, or without quantize"
                )
