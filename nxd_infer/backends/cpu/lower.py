"""The passes of the CPU backend: from canonical graphs to the ones that are run step by step.

States are changed in place. Native operators are inserted, composite operators without a native one become their plain
PyTorch references, and what lies between products is fused. Weights are packed if every bucket can read them so
(:mod:`nxd_infer.backends.cpu.packing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from nxd_infer.backends.cpu import packing
from nxd_infer.backends.cpu.encodings import PACKED, PACKED_ACROSS, PACKED_INT8, PACKED_OPTION, QUANTIZATIONS, QUANTIZE
from nxd_infer.backends.cpu.fuse import fuse
from nxd_infer.backends.cpu.in_place import update_in_place
from nxd_infer.graph import passes
from nxd_infer.graph.canonical import Graph, weight_nodes
from nxd_infer.graph.ir import IN_PLACE, graph_to_ir
from nxd_infer.graph.passes import in_place
from nxd_infer.graph.stored import Lowered, ir_text, read_ir
from nxd_infer.ops import COMPOSITE

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
    native = passes.insert_operators(module, library, COMPOSITE)
    passes.simplify(module)
    passes.eliminate_dead_code(module)
    update_in_place(module)
    passes.clone_aliased_outputs(module)
    return native


def _choose(
    modules: Sequence[fx.GraphModule], graphs: Sequence[Graph], options: Mapping[str, Any], library: Any
) -> dict[str, str]:
    """Return the encoding of every weight that has one; for a stored graph that reads rounded weights, of those."""
    nodes = [weight_nodes(module, graph.file) for module, graph in zip(modules, graphs, strict=True)]
    if kept := {weight.name for graph in graphs for weight in graph.file.weights if weight.encoding}:
        found = packing.choose(nodes, 1, PACKED_INT8)
        return {name: form for name, form in found.items() if name in kept or form == PACKED_ACROSS}
    minimum = options.get(PACKED_OPTION, 0)
    quantization = QUANTIZATIONS.get(options.get(QUANTIZE, ""))
    form = PACKED if quantization is None else quantization.encoding
    found = packing.choose(nodes, minimum, form)
    if library is None:  # then packed weights are slower than plain ones
        return {name: form for name, form in found.items() if form == PACKED_INT8}
    return found


def _encode(module: fx.GraphModule, graph: Graph, encodings: Mapping[str, str], library: Any) -> bool:
    """Read the weights of ``encodings`` in their encoded form; True if the graph calls native operators for it."""
    if not packing.insert(weight_nodes(module, graph.file), encodings, library):
        return False
    if library is None:
        passes.insert_operators(module, None, COMPOSITE)
    passes.eliminate_dead_code(module)
    return library is not None


def read_program(graph_dir: Path) -> dict[str, Any]:
    """Read what :func:`lower` made of a stored graph."""
    return read_ir(graph_dir, PROGRAM_FILE)
