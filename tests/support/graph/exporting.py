"""Modules traced and lowered for the CPU in this process, and loaded with the eager backend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.artifact.manifest import GraphSpec
from nxd_infer.backends import registry
from nxd_infer.backends.base import Executable, RankGraph
from nxd_infer.backends.cpu.lower import PROGRAM_FILE, lower
from nxd_infer.context import make_context
from nxd_infer.graph.canonical import Graph, name_lowered, trace_graph
from nxd_infer.graph.export import Step, named_inputs
from nxd_infer.graph.stored import Lowered, write_graph
from nxd_infer.layout.sources import named_tensors


class Runtime:
    context = make_context()
    threads = 1

    def library(self, content_hash: str) -> Any:
        raise AssertionError(content_hash)


class Entry:
    """One bucket: its canonical graph, and what the CPU's passes made of it (``ir``)."""

    def __init__(self, canonical: Graph, lowered: Lowered, configuration: Mapping[str, Any]):
        self.canonical, self.lowered = canonical, lowered
        name_lowered(lowered, canonical, configuration)
        self.graph, self.digest = lowered.graph, lowered.graph.digest
        self.ir = json.loads(lowered.files[PROGRAM_FILE])
        self.constants, self.structure = canonical.constants, canonical.structure


def entries(
    steps: Sequence[Step],
    library: Any = None,
    options: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any] | None = None,
) -> list[Entry]:
    """The buckets of one rank. ``options``: the backend's, by default none is packed."""
    graphs = [trace_graph(step) for step in steps]
    made = lower(graphs, options or {}, library)
    return [Entry(graph, lowered, configuration or {}) for graph, lowered in zip(graphs, made, strict=True)]


def lowered(module: nn.Module, *example: Tensor, **more: Any) -> tuple[Entry, Step]:
    tensors, keyword = named_inputs(module.eval(), list(example))
    step = Step(module, tensors, keyword, **more)
    return entries([step])[0], step


def load(
    backend: str, path: Path, spec: GraphSpec, states: dict[str, Any], weights: dict[str, Any], runtime: Any = None
) -> Executable:
    """One graph of one rank."""
    return registry.get(backend).load([RankGraph(path, spec, states, weights)], runtime or Runtime())


def loaded(module: nn.Module, entry: Entry, path: Path) -> tuple[Executable, dict[str, Tensor], dict[str, Tensor]]:
    """The graph loaded on copies of the module's tensors: executable, states, weights."""
    write_graph(entry.lowered, path)
    own = named_tensors(module)
    states = {spec.name: own[spec.name].detach().clone() for spec in entry.graph.states}
    weights = {
        spec.name: entry.constants[spec.name] if spec.name in entry.constants else own[spec.name].detach().clone()
        for spec in entry.graph.weights
    }
    return load("eager", path, entry.graph.spec(), states, weights), states, weights


def follow(
    module: nn.Module,
    path: Path,
    calls: Sequence[Sequence[Tensor]],
    aliases: Mapping[int, str] | None = None,
    states: Sequence[str] = (),
) -> tuple[Entry, Step]:
    """Calls of the graph give what those of the module give, and keep the states that it keeps; no input changes, and
    no result of an earlier call."""
    aliases = aliases or {}
    entry, step = lowered(module, *calls[0], aliases=dict(aliases), states=list(states))
    run, kept, _ = loaded(module, entry, path)
    results: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for inputs in calls:
            given = [x.clone() for x in inputs]
            found, wanted = run(given), module(*(x.clone() for x in inputs))
            assert all(map(torch.equal, given, inputs))
            outputs = wanted if isinstance(wanted, tuple) else (wanted,)
            results += zip(found, [x.clone() for i, x in enumerate(outputs) if i not in aliases], strict=True)
            for index, value in [(i, outputs[i].clone()) for i in aliases]:
                setattr(module, aliases[index], value)
            for name in step.states:
                assert torch.equal(kept[name], named_tensors(module)[name]), name
    for one, other in results:
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    return entry, step


def operators(entry: Entry) -> list[str]:
    return [node[0] for node in entry.ir["nodes"]]


def joined_calls(entry: Entry, operator: Any) -> list[int]:
    """How many layers each call of an operator on several packed linears holds."""
    found = [arguments for name, arguments, *_ in entry.ir["nodes"] if name == str(operator)]
    return [len(tensors) // (2 if biased else 1) for _, tensors, biased in found]
