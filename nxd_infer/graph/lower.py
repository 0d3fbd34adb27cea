"""From a module to a :class:`~nxd_infer.graph.stored.Lowered`: export, lower, take the digest, write it down."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from nxd_infer.artifact.manifest import InputSpec, OutputSpec, TensorSpec, WeightSpec
from nxd_infer.graph import packing, passes
from nxd_infer.graph.export import Exported, Step, export
from nxd_infer.graph.ir import graph_to_ir
from nxd_infer.graph.stored import GraphFile, Lowered, ir_text, read_ir

CODE = 3
"""Counts up when graphs are compiled otherwise than before: code in a cache is that of an earlier count."""


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
    passes.scatter_to_index_put(module)
    native = passes.insert_operators(module, library, COMPOSITE)
    passes.simplify(module)
    passes.eliminate_dead_code(module)
    passes.update_in_place(module)
    passes.clone_aliased_outputs(module)
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
        collectives=passes.collective_sequence(exported.module),
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

    if not packing.insert(weight_nodes(lowered, exported), encodings, library):
        return
    if library is None:
        passes.insert_operators(exported.module, None, COMPOSITE)
    else:
        lowered.graph.ops = sorted({*lowered.graph.ops, library.hash})
    passes.eliminate_dead_code(exported.module)
    lowered.ir = graph_to_ir(exported.module)
    lowered.graph.weights = [
        packing.encoded_spec(weight, encodings.get(weight.name, "")) for weight in lowered.graph.weights
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


def graph_module(graph_dir: str | os.PathLike[str]) -> fx.GraphModule:
    """The stored graph as an ``fx.GraphModule``, for a compiler."""
    from nxd_infer.graph.ir import ir_to_graph

    return ir_to_graph(read_ir(graph_dir))
