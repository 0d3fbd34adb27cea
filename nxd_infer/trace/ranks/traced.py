"""What a rank made: its graphs, its weights, how these are assembled from logical weights; and its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.artifact.manifest import BucketSpec, TensorSpec, WeightSpec
from nxd_infer.artifact.rank_weights import STATE_PREFIX, file_entries
from nxd_infer.backends.base import Backend
from nxd_infer.errors import TraceError
from nxd_infer.graph.stored import GraphFile, Lowered, write_graph
from nxd_infer.layout import ParamLayout, layout_of, weight_layout
from nxd_infer.layout.files.stream import STORED_DTYPES, write_safetensors
from nxd_infer.layout.sources import named_tensors
from nxd_infer.modules.lora.slots import AdapterTables
from nxd_infer.trace.request import TraceRequest
from nxd_infer.util.memory import give_back

CANONICAL_FILE = "canonical.txt"
"""In a graph's directory until the artifact is written: the text of its digest, for comparing ranks."""
WEIGHTS_FILE = "weights.safetensors"


@dataclass
class Built:
    """The user's module for one bucket, and its declared states."""

    module: nn.Module
    aliases: dict[int, str]
    states: list[str]
    overlaps: dict[str, str]
    """Tensors that shared memory when ``func`` returned them; later code stores each separately."""


@dataclass
class TracedRank:
    """One rank: one pipeline stage of a tensor parallel rank, with all buckets and the tables that they share.

    Once it is written, the fields after ``layout`` are empty.
    """

    rank: int = 0
    """Stage by stage, as in the artifact."""
    stage: int = 0
    buckets: list[BucketSpec] = field(default_factory=list)
    """Each with the digest of this rank's graph, and this stage alone."""
    graphs: list[GraphFile] = field(default_factory=list)
    """The graph of each bucket."""
    states: dict[str, TensorSpec] = field(default_factory=dict)
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)

    built: list[Built] = field(default_factory=list)
    constants: list[dict[str, Tensor]] = field(default_factory=list)
    """Each bucket's weights that are neither parameters nor buffers."""
    lowered: list[Lowered] = field(default_factory=list)
    origin: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Weight -> the bucket whose module (or constants) holds it, and its name there."""
    _tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return parameters and buffers of a bucket's module, by every name; buckets may share one module."""
        module = self.built[index].module
        if id(module) not in self._tensors:
            self._tensors[id(module)] = named_tensors(module)
        return self._tensors[id(module)]

    def value(self, index: int, name: str) -> Tensor:
        """Return the tensor ``name`` of a bucket's module (or its constants); fake if it was built fake."""
        constants = self.constants[index]
        return constants[name] if name in constants else self.tensors(index)[name].detach()

    def with_modules(self, built: list[Built]) -> TracedRank:
        """Return the same graphs with the tensors of other modules."""
        return replace(self, built=built, _tensors={})


def is_symbolic(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return tensor.is_meta or isinstance(tensor, FakeTensor)


# --- files --------------------------------------------------------------------------------------------


def rank_directory(build: Path, rank: int) -> Path:
    return build / f"rank_{rank:02d}"


def graph_directory(build: Path, rank: int, digest: str) -> Path:
    return rank_directory(build, rank) / "graphs" / digest


def write_rank(
    request: TraceRequest,
    traced: TracedRank,
    tp_rank: int,
    states: Mapping[str, Tensor],
    value: Callable[[WeightSpec], Tensor],
    build: Path,
) -> TracedRank:
    """Write one pipeline stage of tensor parallel rank ``tp_rank`` below ``build``, and return what others need of it.

    ``states``: those that do not start as zeros; ``value``: the value of a weight.
    """
    degree = request.options.tp_degree
    rank = traced.stage * degree + tp_rank
    for lowered in traced.lowered:
        directory = graph_directory(build, rank, lowered.digest)
        if not directory.exists():
            write_graph(lowered, directory)
            (directory / CANONICAL_FILE).write_text(lowered.text, encoding="utf-8")
    backend = request.backend if request.options.packed else None
    _write_weights(traced, states, value, rank_directory(build, rank) / WEIGHTS_FILE, backend)
    return TracedRank(
        rank=rank,
        stage=traced.stage,
        buckets=traced.buckets,
        graphs=traced.graphs,
        states=dict(sorted(traced.states.items())),
        weights=dict(sorted(traced.weights.items())),
        layout=_described_layout(traced, degree) if tp_rank == 0 else {},
    )


def _write_weights(
    traced: TracedRank,
    states: Mapping[str, Tensor],
    value: Callable[[WeightSpec], Tensor],
    path: Path,
    packs: Backend | None,
) -> None:
    """Write the rank's weight file, one tensor in memory at a time: weights by name, states as ``state:<name>``. Those
    that have an encoding are written in it if a backend ``packs`` them.

    Order and contents are the same on every run. Raises TraceError for a dtype that the file cannot hold.
    """
    specs = [traced.weights[name] for name in sorted(traced.weights)]
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
        return packs.encode(spec, tensor.detach()) if packs is not None and spec.encoding else tensor.detach()

    held = [packs.encoded(spec) if packs is not None and spec.encoding else spec for spec in specs]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        write_safetensors(file, file_entries(held), checked)


# --- states and layouts -------------------------------------------------------------------------------


def initial_states(request: TraceRequest, traced: TracedRank) -> dict[str, Tensor]:
    """Return the states that do not start as zeros."""
    config = request.bucket_config
    buffers = config.shared_state_buffer if config is not None else None
    shared = dict(zip(shared_names(request, traced), buffers or (), strict=True))
    tables = [traced.tensors(index) for index in range(len(traced.built))]
    values: dict[str, Tensor] = {}
    for name in traced.states:
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


def shared_names(request: TraceRequest, traced: TracedRank) -> list[str]:
    """Return the states that start as the tensors of the shared state buffer, in its order."""
    if request.bucket_config is None or request.bucket_config.shared_state_buffer is None:
        return []
    first = traced.built[0]
    return list(first.aliases.values()) or first.states


def state_layouts(traced: TracedRank) -> dict[str, ParamLayout]:
    """Return the layouts of states that a checkpoint may hold (parameters, persistent buffers)."""
    layouts: dict[str, ParamLayout] = {}
    for module in {id(b.module): b.module for b in reversed(traced.built)}.values():
        layouts.update({name: entry for name, entry in weight_layout(module).items() if name in traced.states})
    return layouts


def layouts_of(traced: TracedRank) -> dict[str, ParamLayout]:
    """Return the layout of each weight in the tables; weights without a logical tensor are omitted."""
    layouts: dict[str, ParamLayout] = {}
    tables: dict[int, Any] = {}
    for name, (index, own) in traced.origin.items():
        module = traced.built[index].module
        table = tables.get(id(module))
        if table is None:
            table = tables[id(module)] = weight_layout(module)
        if own in table:
            layouts[name] = table[own]
            # Other names under which a checkpoint may hold a tied weight; the graph may use any of them.
            first = table[own].alias_of or own
            ties = {other: entry for other, entry in table.items() if first in (other, entry.alias_of)}
            layouts.update({other: entry for other, entry in ties.items() if other not in layouts})
    return {name: layouts[name] for name in sorted(layouts)}


def describe_layout(layouts: Mapping[str, ParamLayout], degree: int) -> dict[str, Any]:
    """Return ``manifest.layout["weights"]`` for layouts with absolute logical names (``layout.weight_layout``)."""
    return {
        name: {
            "logical": {key: list(shape) for key, shape in layout.logical_shapes.items()},
            "ranks": [layout.rank_layout(degree, rank).to_json() for rank in range(degree)],
            **({"alias_of": layout.alias_of} if layout.alias_of else {}),
        }
        for name, layout in layouts.items()
    }


def _described_layout(traced: TracedRank, degree: int) -> dict[str, Any]:
    """Return ``manifest.layout`` for this stage: how each weight and each adapter table is assembled from logical
    tensors, and the logical tensors that no graph reads."""
    weights = layouts_of(traced)
    modules = {id(b.module): b.module for b in traced.built}.values()
    tables = {
        name: layout.resolved(path, own)
        for module in modules
        for path, child in module.named_modules()
        if isinstance(child, AdapterTables)
        for own in ("A", "B")
        if (name := f"{path}.{own}") in traced.weights and (layout := layout_of(child, own)) is not None
    }
    known = {
        logical
        for module in modules
        for name, layout in weight_layout(module).items()
        if name not in traced.states
        for logical in layout.logical_names
    }
    return {
        "weights": describe_layout(weights, degree),
        **({"adapters": describe_layout(tables, degree)} if tables else {}),
        "unread": sorted(known.difference(*(layout.logical_names for layout in weights.values()))),
    }
