"""From a module to a :class:`~nxd_infer.backends.base.Lowered`: export, lower, take the digest, write it down."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nxd_infer.backends import encoding, lowering
from nxd_infer.backends.base import GRAPH_FILE, IR_FILE, GraphFile, Lowered
from nxd_infer.backends.export import Exported, Step, export
from nxd_infer.backends.ir import graph_to_ir, ir_text
from nxd_infer.errors import ArtifactCorruptError, BackendUnavailableError
from nxd_infer.trace.manifest import InputSpec, OutputSpec, TensorSpec, WeightSpec

CODE = 3
"""Counts up when graphs are compiled otherwise than before: code in a cache is that of an earlier count."""


def native_library() -> Any | None:
    """The native operators, or None where they cannot be built (no compiler, no headers)."""
    from nxd_infer import native
    from nxd_infer.errors import BackendUnavailableError

    if not native.availability().ok:
        return None
    try:
        return native.load()
    except BackendUnavailableError:
        return None


def configuration(backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What compiled code depends on beside its graph; part of every digest."""
    return {"backend": backend, "options": dict(options), "inputs": "states, inputs, weights"}


def lower(step: Step, library: Any | None, configuration: Mapping[str, Any]) -> tuple[Lowered, Exported]:
    """Export ``step`` and put the operators of ``library`` in.

    ``configuration`` is what else compiled code depends on (backend, options, versions); it goes into the digest.
    """
    from nxd_infer.ops import COMPOSITE

    exported = export(step)
    module = exported.module
    lowering.scatter_to_index_put(module)
    native = lowering.insert_operators(module, library, COMPOSITE)
    lowering.simplify(module)
    lowering.eliminate_dead_code(module)
    lowering.update_in_place(module)
    lowering.clone_aliased_outputs(module)
    _drop_unused_weights(exported)
    return _record(exported, step, library if native else None, configuration), exported


def _drop_unused_weights(exported: Exported) -> None:
    graph = exported.module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first = len(exported.states) + len(exported.inputs)
    kept = []
    for node, name in zip(placeholders[first:], exported.weights, strict=True):
        if node.users:
            kept.append(name)
        else:
            graph.erase_node(node)
    exported.weights = kept


def _record(exported: Exported, step: Step, library: Any | None, configuration: Mapping[str, Any]) -> Lowered:
    nodes = list(exported.module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    values = iter(node.meta["val"] for node in placeholders)
    states = [TensorSpec.of(name, next(values)) for name in exported.states]
    inputs = [InputSpec.of(name, next(values)) for name in exported.inputs]
    parameters = dict(step.module.named_parameters(remove_duplicate=False))
    weights = []
    for name in exported.weights:
        kind = "constant" if name in exported.constants else "parameter" if name in parameters else "buffer"
        weights.append(WeightSpec.of(name, next(values), kind=kind))
    results = [node.meta["val"] for node in nodes[-1].args[0]]
    outputs = [OutputSpec.of(name, value) for name, value in zip(exported.outputs, results, strict=True)]
    graph = GraphFile(
        digest="",
        inputs=inputs,
        outputs=outputs,
        states=states,
        weights=weights,
        collectives=lowering.collective_sequence(exported.module),
        ops=[library.hash] if library is not None else [],
    )
    ir = graph_to_ir(exported.module)
    lowered = Lowered(ir, graph, "", exported.constants, exported.structure)
    rename_weights(lowered, {}, configuration)
    return lowered


def weight_nodes(lowered: Lowered, exported: Exported) -> dict[str, fx.Node]:
    """The placeholder of each weight, by the name that ``lowered`` gives it."""
    placeholders = [node for node in exported.module.graph.nodes if node.op == "placeholder"]
    first = len(exported.states) + len(exported.inputs)
    names = [weight.name for weight in lowered.graph.weights]
    return dict(zip(names, placeholders[first:], strict=True))


def encode(
    lowered: Lowered, exported: Exported, encodings: Mapping[str, str], library: Any, configuration: Mapping[str, Any]
) -> None:
    """Read the weights of ``encodings`` in their encoded form; the digest is taken anew."""
    from nxd_infer.ops import COMPOSITE

    if not encoding.insert(weight_nodes(lowered, exported), encodings, library):
        return
    if library is None:
        lowering.insert_operators(exported.module, None, COMPOSITE)
    else:
        lowered.graph.ops = sorted({*lowered.graph.ops, library.hash})
    lowering.eliminate_dead_code(exported.module)
    lowered.ir = graph_to_ir(exported.module)
    lowered.graph.weights = [
        encoding.encoded_spec(weight, encodings.get(weight.name, "")) for weight in lowered.graph.weights
    ]
    rename_weights(lowered, {}, configuration)


def rename_weights(lowered: Lowered, names: Mapping[str, str], configuration: Mapping[str, Any]) -> None:
    """Give weights other names (two buckets may hold different tensors under one name), and take the digest anew.

    ``lowered.constants`` keeps the names the module knows.
    """
    for weight in lowered.graph.weights:
        weight.name = names.get(weight.name, weight.name)
    lowered.text = canonical_text(lowered.ir, lowered.graph, configuration)
    lowered.graph.digest = digest_of(lowered.text)


def canonical_text(ir: Mapping[str, Any], graph: GraphFile, configuration: Mapping[str, Any]) -> str:
    """What a digest covers: configuration, the specs of every placeholder and output, operators, the graph.

    No value of a weight or constant is in it, and no rank.
    """
    rows = [json.dumps({"torch": torch.__version__, "code": CODE, **configuration}, sort_keys=True, default=str)]
    for kind, specs in (
        ("state", graph.states),
        ("input", graph.inputs),
        ("weight", graph.weights),
        ("output", graph.outputs),
    ):
        rows += [f"{kind} {s.name} {s.dtype} {s.shape} {s.stride} {getattr(s, 'encoding', '')}".rstrip() for s in specs]
    rows += [f"op {content_hash}" for content_hash in graph.ops]
    return "\n".join(rows) + "\n" + ir_text(dict(ir))


def digest_of(text: str) -> str:
    """40 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def write_graph(lowered: Lowered, graph_dir: str | os.PathLike[str]) -> Path:
    """Write ``graph.json`` and ``ir.json``."""
    path = Path(graph_dir)
    path.mkdir(parents=True, exist_ok=True)
    (path / IR_FILE).write_text(ir_text(lowered.ir), encoding="utf-8")
    (path / GRAPH_FILE).write_text(lowered.graph.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return path


def read_graph(graph_dir: str | os.PathLike[str], digest: str | None = None) -> GraphFile:
    """Read ``graph.json``. Raises ArtifactCorruptError when it is not there, not one, or of another digest."""
    path = Path(graph_dir) / GRAPH_FILE
    try:
        graph = GraphFile.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactCorruptError(f"{path} cannot be read: {error}") from error
    if digest is not None and graph.digest != digest:
        raise ArtifactCorruptError(f"{path} is graph {graph.digest}, expected {digest}")
    return graph


def read_ir(graph_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read ``ir.json``. Raises ArtifactCorruptError when it is not there or not one."""
    path = Path(graph_dir) / IR_FILE
    try:
        ir = json.loads(path.read_bytes())
        if not {"inputs", "nodes", "outputs"} <= ir.keys():
            raise ValueError("it is no graph")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ArtifactCorruptError(f"{path} cannot be read: {error}") from error
    return ir


def register_operators(graph: GraphFile, graph_dir: Path) -> list[Any]:
    """The native libraries that the graph calls, registered: those in ``ops/`` beside ``graphs/``, else this package's.

    Raises BackendUnavailableError when the graph calls those of another version that are not there.
    """
    from nxd_infer import native

    libraries = []
    for content_hash in graph.ops:
        beside = graph_dir.parents[1] / "ops" / f"{content_hash}.so"
        found = native.load_file(beside) if beside.is_file() else native.load()
        if found.hash != content_hash:
            raise BackendUnavailableError(
                f"graph {graph.digest} calls the operators {content_hash}, and this version has {found.hash}: "
                "trace the model again"
            )
        libraries.append(found)
    return libraries


def graph_module(graph_dir: str | os.PathLike[str]) -> fx.GraphModule:
    """The stored graph as an ``fx.GraphModule``, for a compiler."""
    from nxd_infer.backends.ir import ir_to_graph

    return ir_to_graph(read_ir(graph_dir))
