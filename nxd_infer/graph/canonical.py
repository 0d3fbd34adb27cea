"""From a module to its canonical graph: exported, in functional form, independent of any backend.

It calls operators of PyTorch and ``torch.ops.nxd``, and takes states, inputs and weights as placeholders. A backend
derives from it what it compiles; artifacts store it too, so that another backend can do the same later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from nxd_infer.artifact.manifest import InputSpec, OutputSpec, TensorSpec, WeightSpec
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.graph import passes
from nxd_infer.graph.export import Exported, Step, export
from nxd_infer.graph.ir import FUNCTIONAL, graph_to_ir, ir_to_graph
from nxd_infer.graph.passes import functional
from nxd_infer.graph.stored import GraphFile, Lowered, ir_text, read_graph, read_ir

CODE = 5
"""Incremented when graphs are compiled differently, which invalidates cached code of earlier values."""


@dataclass(frozen=True)
class Graph:
    """One bucket of one rank: a functional graph whose nodes carry fake tensors, and the specs of its arguments.

    It holds no weight values, so a compiler cannot bake one in.
    """

    module: fx.GraphModule
    file: GraphFile
    """Without a digest, which depends on the backend's passes."""
    constants: dict[str, Tensor] = field(default_factory=dict)
    """Values of the weights that are neither parameters nor buffers of the module, by name."""
    structure: Any = None
    """How to rebuild the outputs: names in nested lists and dictionaries."""

    def ir(self) -> dict[str, Any]:
        """Return the graph as data; see :mod:`nxd_infer.graph.ir`."""
        return graph_to_ir(self.module, FUNCTIONAL)


def trace_graph(step: Step) -> Graph:
    """Export ``step``. Raises TraceError if that fails."""
    exported = export(step)
    passes.clone_aliased_outputs(exported.module)
    specs = _specs(exported, step)
    module = functional(exported.module, len(exported.states))
    return Graph(module, specs, exported.constants, exported.structure)


def _specs(exported: Exported, step: Step) -> GraphFile:
    nodes = list(exported.module.graph.nodes)
    values = iter(node.meta["val"] for node in nodes if node.op == "placeholder")
    states = [TensorSpec.of(name, next(values)) for name in exported.states]
    inputs = [InputSpec.of(name, next(values)) for name in exported.inputs]
    parameters = dict(step.module.named_parameters(remove_duplicate=False))
    weights = []
    for name in exported.weights:
        kind = "constant" if name in exported.constants else "parameter" if name in parameters else "buffer"
        weights.append(WeightSpec.of(name, next(values), kind=kind))
    results = [node.meta["val"] for node in nodes[-1].args[0]]
    outputs = [OutputSpec.of(name, value) for name, value in zip(exported.outputs, results, strict=True)]
    return GraphFile(
        digest="",
        inputs=inputs,
        outputs=outputs,
        states=states,
        weights=weights,
        collectives=passes.collective_sequence(exported.module),
    )


def stored_graph(directory: Path, rounded: Container[str] = ()) -> Graph:
    """Return the canonical graph in a graph's directory, for a backend's passes.

    ``rounded``: the encodings that are part of what the model computes and stay; others are the backend's choice.
    Raises ArtifactCorruptError if there is none.
    """
    file = read_graph(directory)
    module = ir_to_graph(read_ir(directory))
    propagate(module, [*file.states, *file.inputs, *file.weights])
    weights = [
        weight if weight.encoding in rounded else weight.model_copy(update={"encoding": ""}) for weight in file.weights
    ]
    known = {"digest": "", "ops": [], "weights": weights, "collectives": passes.collective_sequence(module)}
    return Graph(module, file.model_copy(update=known))


def propagate(module: fx.GraphModule, specs: Sequence[TensorSpec]) -> None:
    """Set ``meta["val"]`` of every node to its fake value, starting from the ``specs`` of the placeholders.

    Raises ArtifactCorruptError for a graph that cannot run on tensors of these specs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.no_grad(), FakeTensorMode():
        values = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype) for spec in specs]
        try:
            _run(module, values)
        except Exception as error:  # operators may raise anything for arguments that we never write
            raise ArtifactCorruptError(f"a stored graph does not fit its tensors: {error}") from error


def _run(module: fx.GraphModule, values: Sequence[Any]) -> Any:
    given = iter(values)

    def value(node: fx.Node) -> Any:
        return node.meta["val"]

    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = next(given)
        elif node.op == "get_attr":
            continue
        elif node.op == "output":
            return fx.map_arg(node.args[0], value)
        elif node.target is torch.ops.higher_order.cond:
            _, first, other, operands = node.args
            inner = [value(operand) for operand in operands]
            results = [_run(getattr(module, str(branch.target)), inner) for branch in (first, other)]
            node.meta["val"] = results[0]
        else:
            node.meta["val"] = node.target(*fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))
    return None


def weight_nodes(module: fx.GraphModule, file: GraphFile) -> dict[str, fx.Node]:
    """Return the placeholder of each weight, by the weight's name in the graph."""
    names = [weight.name for weight in file.weights]
    return dict(zip(names, passes.placeholders(module.graph)[len(file.states) + len(file.inputs) :], strict=True))


# --- digests ------------------------------------------------------------------------------------------


def configuration(backend: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what compiled code depends on besides its graph; part of every digest."""
    return {"backend": backend, "options": dict(options), "inputs": "states, inputs, weights"}


def name_lowered(lowered: Lowered, canonical: Graph, configuration: Mapping[str, Any]) -> None:
    """Keep the canonical graph with what a backend made of it, and set the digest of both: 40 hexadecimal digits."""
    lowered.ir = canonical.ir()
    lowered.text = _canonical_text(lowered.ir, lowered.graph, configuration, lowered.files)
    lowered.graph.digest = hashlib.sha256(lowered.text.encode()).hexdigest()[:40]


def _canonical_text(
    ir: dict[str, Any], graph: GraphFile, configuration: Mapping[str, Any], files: Mapping[str, str]
) -> str:
    """Return the text for a digest: configuration, the specs of every placeholder and output, operators, the graph.

    ``files``: what the backend stores beside the graph, and may compile instead of it. The text contains no weight or
    constant values, and no rank.
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
    stored = [f"file {name} {hashlib.sha256(text.encode()).hexdigest()}\n" for name, text in sorted(files.items())]
    # digests last: where two texts are compared, an operator says more
    return "\n".join(rows) + "\n" + ir_text(ir) + "".join(stored)
