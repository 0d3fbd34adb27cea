"""A rank's results as files: its graphs, its weights, and how these are assembled from logical weights."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.layouts import describe_layout
from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.artifact.rank_weights import STATE_PREFIX, file_entries
from nxd_infer.errors import TraceError
from nxd_infer.graph.stored import write_graph
from nxd_infer.layout import ParamLayout, layout_of, weight_layout
from nxd_infer.layout.files.stream import STORED_DTYPES, write_safetensors
from nxd_infer.modules.lora.slots import AdapterTables
from nxd_infer.trace.ranks.rank_graphs import RankGraphs, is_symbolic
from nxd_infer.trace.request import TracedRank, TraceRequest, rank_directory
from nxd_infer.util.memory import give_back

CANONICAL_FILE = "canonical.txt"
WEIGHTS_FILE = "weights.safetensors"
RESULT_FILE = "result.json"


def write_rank(
    request: TraceRequest,
    graphs: RankGraphs,
    tp_rank: int,
    states: Mapping[str, Tensor],
    value: Callable[[WeightSpec], Tensor],
    build: Path,
    start: float,
) -> TracedRank:
    """Write one pipeline stage of tensor parallel rank ``tp_rank`` below ``build``, and return its result.

    ``states``: those that do not start as zeros; ``value``: the value of a weight; ``start``: when the trace began.
    """
    rank = graphs.stage * request.tp_degree + tp_rank
    out = rank_directory(build, rank)
    write_graphs(graphs, out)
    write_weights(graphs, states, value, out / WEIGHTS_FILE)
    result = TracedRank(
        rank=rank,
        buckets=graphs.buckets,
        states=[graphs.states[name] for name in sorted(graphs.states)],
        weights=[graphs.weights[name] for name in sorted(graphs.weights)],
        layout=described_layout(graphs, layouts(graphs), request.tp_degree) if tp_rank == 0 else {},
        seconds=time.monotonic() - start,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    (out / RESULT_FILE).write_text(result.model_dump_json(), encoding="utf-8")
    return result


def write_weights(
    graphs: RankGraphs, states: Mapping[str, Tensor], value: Callable[[WeightSpec], Tensor], path: Path
) -> None:
    """Write the rank's weight file, one tensor in memory at a time: weights by name, states as ``state:<name>``.

    Order and contents are the same on every run. Raises TraceError for a dtype that the file cannot hold.
    """
    specs = [graphs.weights[name] for name in sorted(graphs.weights)]
    specs += [WeightSpec.of(STATE_PREFIX + name, states[name]) for name in sorted(states)]
    wrong = [spec for spec in specs if spec.torch_dtype not in STORED_DTYPES]
    if wrong:
        raise TraceError(
            f"the weight {wrong[0].name!r} is {wrong[0].dtype}, which a weight file cannot hold; convert it"
        )

    by_name = {spec.name: spec for spec in specs}

    def checked(name: str) -> Tensor:
        spec = by_name[name]
        if spec.nbytes >= 1 << 20:
            give_back()  # memory that was read for the previous tensor
        if name.startswith(STATE_PREFIX):
            return states[name.removeprefix(STATE_PREFIX)]
        tensor = value(spec)
        if tensor.dtype != spec.torch_dtype or list(tensor.shape) != spec.shape or is_symbolic(tensor):
            raise TraceError(
                f"the weight {name!r} has no value of {spec.dtype}{spec.shape}, it is "
                f"{tensor.dtype}{list(tensor.shape)} on {tensor.device}"
            )
        return tensor.detach()

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        write_safetensors(file, file_entries(specs), checked)


def write_graphs(graphs: RankGraphs, directory: Path) -> None:
    """Write ``graphs/<digest>/`` below ``directory``, with the canonical text of each for comparing ranks."""
    for ir, entry in zip(graphs.ir, graphs.lowered, strict=True):
        path = directory / "graphs" / entry.digest
        if not path.exists():
            write_graph(ir, entry, path)
            (path / CANONICAL_FILE).write_text(entry.text, encoding="utf-8")


def initial_states(request: TraceRequest, graphs: RankGraphs) -> dict[str, Tensor]:
    """Return the states that do not start as zeros."""
    shared = dict(zip(shared_names(request, graphs), request.shared_states or (), strict=True))
    values: dict[str, Tensor] = {}
    tables = [graphs.tensors(index) for index in range(len(graphs.built))]
    for name in graphs.states:
        tensor = shared.get(name)
        if tensor is None:
            tensor = next(table for table in tables if name in table)[name].detach()
        if not is_symbolic(tensor) and bool(_words(tensor).any()):
            values[name] = tensor.contiguous()
    return values


def _words(tensor: Tensor) -> Tensor:
    """Return the memory of ``tensor`` as int64 if it can be read so, which is several times faster for large caches."""
    size = tensor.element_size()
    whole = tensor.is_contiguous() and tensor.dim() > 0 and tensor.shape[-1] * size % 8 == 0
    return tensor.view(torch.int64) if whole and tensor.storage_offset() * size % 8 == 0 else tensor.ne(0)


def shared_names(request: TraceRequest, graphs: RankGraphs) -> list[str]:
    """Return the states that start as the tensors of the shared state buffer, in its order."""
    first = graphs.built[0]
    return [] if request.shared_states is None else list(first.aliases.values()) or first.states


def state_layouts(graphs: RankGraphs) -> dict[str, Any]:
    """Return the layouts of states that a checkpoint may hold (parameters, persistent buffers)."""
    found: dict[str, Any] = {}
    for module in {id(b.module): b.module for b in reversed(graphs.built)}.values():
        found.update({name: entry for name, entry in weight_layout(module).items() if name in graphs.states})
    return found


def layouts(graphs: RankGraphs) -> dict[str, Any]:
    """Return the layout of each weight in the tables; weights without a logical tensor are omitted."""
    found: dict[str, Any] = {}
    tables: dict[int, Any] = {}
    for name, (index, own) in graphs.origin.items():
        module = graphs.built[index].module
        table = tables.get(id(module))
        if table is None:
            table = tables[id(module)] = weight_layout(module)
        if own in table:
            found[name] = table[own]
            # Other names under which a checkpoint may hold a tied weight; the graph may use any of them.
            first = table[own].alias_of or own
            ties = {other: entry for other, entry in table.items() if first in (other, entry.alias_of)}
            found.update({other: entry for other, entry in ties.items() if other not in found})
    return {name: found[name] for name in sorted(found)}


def described_layout(graphs: RankGraphs, weights: Mapping[str, ParamLayout], degree: int) -> dict[str, Any]:
    """Return ``manifest.layout`` for this stage: how each weight and each adapter table is assembled from logical
    tensors, and the logical tensors that no graph reads."""
    modules = {id(b.module): b.module for b in graphs.built}.values()
    tables = {
        name: layout.resolved(path, own)
        for module in modules
        for path, child in module.named_modules()
        if isinstance(child, AdapterTables)
        for own in ("A", "B")
        if (name := f"{path}.{own}") in graphs.weights and (layout := layout_of(child, own)) is not None
    }
    found = describe_layout(weights, degree)
    if tables:
        found["adapters"] = describe_layout(tables, degree)["weights"]
    known = {
        logical
        for module in modules
        for name, layout in weight_layout(module).items()
        if name not in graphs.states
        for logical in layout.logical_names
    }
    return {**found, "unread": sorted(known.difference(*(layout.logical_names for layout in weights.values())))}
