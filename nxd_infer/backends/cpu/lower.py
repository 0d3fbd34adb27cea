"""The passes of the CPU backend: from canonical graphs to the ones that are run step by step.

States are changed in place. Native operators are inserted, composite operators without a native one become their plain
PyTorch references, and what lies between products is fused. Weights are packed if every bucket can read them so
(:mod:`nxd_infer.backends.cpu.packing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nxd_infer import native
from nxd_infer.backends.cpu import packing
from nxd_infer.backends.cpu.encodings import (
    PACKED,
    PACKED_INT8,
    PACKED_OPTION,
    QUANTIZATIONS,
    QUANTIZE,
    ROUNDED,
    int4_form,
)
from nxd_infer.backends.cpu.fuse import fuse
from nxd_infer.backends.cpu.scaled import separate_scales
from nxd_infer.errors import TraceConfigError
from nxd_infer.graph import passes
from nxd_infer.graph.canonical import Graph, weight_nodes
from nxd_infer.graph.ir import IN_PLACE, graph_to_ir
from nxd_infer.graph.passes import aten, in_place
from nxd_infer.graph.stored import Lowered, ir_text, read_ir
from nxd_infer.ops import COMPOSITE

_BEFORE_PACKING = {op: plain for op, plain in COMPOSITE.items() if op is not torch.ops.nxd.expert_linear.default}
"""Composites of which the plain form is never packed: an expert's matrix is known by its operator."""

MOST_WITHOUT_OPERATORS = 16 << 20
"""Most weights in four bits that PyTorch packs and multiplies by: it takes eight seconds for a million."""
PROGRAM_FILE = "program.json"
"""File beside ``ir.json``: the graph after these passes."""


def lower(graphs: Sequence[Graph], options: Mapping[str, Any], library: Any) -> list[Lowered]:
    """Lower the graphs of one rank's buckets together, because a weight has one form for all of them.

    ``library``: the native operators, None: without any.
    """
    modules = [in_place(graph.module, len(graph.file.states)) for graph in graphs]
    native = [_lower(module, library) for module in modules]
    encodings = _choose(modules, graphs, options, library)
    lowered = []
    for graph, module, calls in zip(graphs, modules, native, strict=True):
        calls |= _encode(module, graph, encodings, library)
        calls |= fuse(module, library)
        file = graph.file.model_copy(deep=True)
        file.ops = [library.hash] if calls else []
        for weight in file.weights:
            weight.encoding = encodings.get(weight.name, "")
        lowered.append(Lowered(file, {PROGRAM_FILE: ir_text(graph_to_ir(module, IN_PLACE))}))
    return lowered


def _lower(module: fx.GraphModule, library: Any) -> bool:
    """Change one bucket's graph; True if it calls native operators."""
    native = passes.insert_operators(module, library, _BEFORE_PACKING)
    passes.simplify(module)
    passes.eliminate_dead_code(module)
    _update_in_place(module)
    passes.clone_aliased_outputs(module)
    return native


_UPDATES: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}


def _update_in_place(module: fx.GraphModule) -> None:
    """Turn ``copy_(state, index_put(state, ...))`` into ``index_put_(state, ...)`` if nothing reads the old value.

    A chain of such updates is changed as a whole. Without this pass a state of 128 MB would be copied twice per call.
    """
    graph = module.graph
    for copy in [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0].op == "placeholder"]:
        state = copy.args[0]
        chain: list[fx.Node] = []
        link = copy.args[1]
        while link.op == "call_function" and link.target in _UPDATES and (not chain or len(link.users) == 1):
            chain.append(link)
            link = link.args[0]
        if link is not state or not chain:
            continue
        chain.reverse()
        order = {node: place for place, node in enumerate(graph.nodes)}
        shared = passes.aliases(graph)
        old_value = {node for node, bases in shared.items() if state in bases}
        if any(value in old_value for node in chain for value in passes.tensors_of(node.args[1:])):
            continue  # an update that takes its new entries, or their places, from the old value
        readers = {user for node in old_value for user in node.users if user.op == "call_function"}
        readers -= {*chain, copy}
        others = [
            node for node in graph.nodes if node is not copy and any(state in shared[w] for w in passes.written(node))
        ]
        late = [reader for reader in readers if order[reader] > order[chain[0]]]
        returned = any(user.op == "output" for node in old_value for user in node.users)
        if others or late or returned or copy.users:
            continue
        for node in chain:
            node.target = _UPDATES[node.target]
        graph.erase_node(copy)


def _choose(
    modules: Sequence[fx.GraphModule], graphs: Sequence[Graph], options: Mapping[str, Any], library: Any
) -> dict[str, str]:
    """Return the encoding of every weight that has one; for a stored graph that reads rounded weights, of those."""
    nodes = [weight_nodes(module, graph.file) for module, graph in zip(modules, graphs, strict=True)]
    minimum = options.get(PACKED_OPTION, 0)
    if library is not None:
        separate_scales(nodes, minimum)
    if kept := {weight.name: weight.encoding for graph in graphs for weight in graph.file.weights if weight.encoding}:
        found = packing.choose(nodes, 1, PACKED_INT8)
        return {name: kept.get(name, form) for name, form in found.items() if name in kept or form != PACKED_INT8}
    quantization = QUANTIZATIONS.get(options.get(QUANTIZE, ""))
    form = PACKED if quantization is None else quantization.encoding
    found = packing.choose(nodes, minimum, form, packing.heads(graphs) if form != PACKED else ())
    if library is None:  # then packed weights are slower than plain ones
        sizes = {name: node.meta["val"].numel() for some in nodes for name, node in some.items()}
        if sum(sizes[name] for name, form in found.items() if int4_form(form)) > MOST_WITHOUT_OPERATORS:
            raise TraceConfigError(
                f"quantize={options[QUANTIZE]!r} needs native operators for a model of this size: "
                f"{native.availability().reason}; or quantize to int8"
            )
        return {name: form for name, form in found.items() if form in ROUNDED}
    return found


def _encode(module: fx.GraphModule, graph: Graph, encodings: Mapping[str, str], library: Any) -> bool:
    """Read the weights of ``encodings`` in their encoded form; True if the graph calls native operators for it."""
    packed = packing.insert(weight_nodes(module, graph.file), encodings, library)
    passes.insert_operators(module, library, COMPOSITE)  # what has no native operator, and experts that stay plain
    passes.eliminate_dead_code(module)
    return packed and library is not None


def read_program(graph_dir: Path) -> dict[str, Any]:
    """Read what :func:`lower` made of a stored graph."""
    return read_ir(graph_dir, PROGRAM_FILE)
