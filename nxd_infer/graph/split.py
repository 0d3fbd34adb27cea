"""Split a graph between the host and a device at named operators: what these need and what follows is derived from the
data flow.

Three parts run one after the other. The *head*, on the host, computes the device's inputs that depend on the host's
states (the ids of a step's tokens, some of which are the last sampled ones). The *body*, on the device, holds
everything that reads a weight or a state of the device. The *tail*, on the host again, is the named operators and what
depends on them: penalties, the sampler, the token memory. Nodes that read only inputs are computed wherever they are
needed. A state belongs entirely to the host or to the device. A graph without a named operator is all body.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nxd_infer.errors import TraceError
from nxd_infer.graph.functional import output_of, placeholders
from nxd_infer.graph.passes import Nodes, memory, tensors_of, written


@dataclass(frozen=True)
class Part:
    """One program. ``takes`` and ``gives`` name its placeholders and results, in order."""

    module: fx.GraphModule
    takes: list[str]
    gives: list[str]


@dataclass(frozen=True)
class Split:
    """The parts in execution order. ``given`` names the full graph's placeholders, in order; a part computes any other
    value. ``results`` names the full graph's outputs and new states."""

    head: Part
    body: Part
    tail: Part
    given: list[str]
    results: list[str]
    host_states: list[int]
    """Indices of the states that live on the host."""

    def run(self, values: Sequence[Any], run: Callable[[Part, list[Any]], Sequence[Any]]) -> list[Any]:
        """Return the full graph's results for these placeholders; ``run(part, arguments)`` runs one part."""
        known = dict(zip(self.given, values, strict=True))
        for part in (self.head, self.body, self.tail):
            known.update(zip(part.gives, run(part, [known[name] for name in part.takes]), strict=True))
        return [known[name] for name in self.results]


def split_at(module: fx.GraphModule, states: int, inputs: int, host: Collection[Any]) -> Split:
    """Split a functional graph with ``states`` states and ``inputs`` inputs at the operators in ``host``.

    Raises TraceError if a state, or a value passed between the sides, would have to be in both places.
    """
    return _Splitter(module, states, inputs, frozenset(host)).split()


class _Splitter:
    def __init__(self, module: fx.GraphModule, states: int, inputs: int, host: frozenset[Any]):
        self.module = module
        self.nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        self.places = placeholders(module.graph)
        self.states = self.places[:states]
        self.weights = set(self.places[states + inputs :])
        self.host = host
        self.order = {node: place for place, node in enumerate(module.graph.nodes)}
        self.memory = memory(module.graph)
        self.results: list[Any] = list(output_of(module.graph).args[0])
        self.needs = self._dependencies()
        self.owner = self._owners()

    def _dependencies(self) -> dict[fx.Node, set[fx.Node]]:
        """Return what must run before each node: its arguments, and earlier writes to their memory."""
        writers: dict[fx.Node, list[fx.Node]] = {}
        found: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            own = set(node.all_input_nodes)
            makers = {maker for value in own for maker in self.memory[value]}
            found[node] = own | {writer for maker in makers for writer in writers.get(maker, [])}
            for target in written(node):
                for maker in self.memory[target]:
                    writers.setdefault(maker, []).append(node)
        self.writers = writers
        return found

    def _owners(self) -> dict[fx.Node, fx.Node]:
        """Return the state of each node that is one, or shares memory with its copy."""
        copies: dict[fx.Node, fx.Node] = {state: state for state in self.states}
        for state in self.states:
            copies.update((user, state) for user in state.users if user.target is torch.ops.aten.clone.default)
        owner = dict(copies)
        for node in self.nodes:
            owner.update((node, copies[maker]) for maker in self.memory[node] if maker in copies)
        return owner

    def _reached(self, start: Callable[[fx.Node], bool], among: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """Return the nodes in ``among`` for which ``start`` holds, or that depend on such a node."""
        found: set[fx.Node] = set()
        for node in self.nodes:
            if among(node) and (start(node) or not found.isdisjoint(self.needs[node])):
                found.add(node)
        return found

    def _closed(self, seeds: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """Return ``seeds`` and everything they need, up to the nodes where ``stop`` holds."""
        found: set[fx.Node] = set()
        pending = list(seeds)
        while pending:
            node = pending.pop()
            if node.op != "placeholder" and node not in found and not stop(node):
                found.add(node)
                pending += self.needs[node]
        return found

    def _states_of(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        return {self.owner[value] for node in nodes for value in (node, *self.needs[node]) if value in self.owner}

    def split(self) -> Split:
        tail = self._reached(lambda node: node.target in self.host, lambda node: True)
        hosted = self._states_of(tail)
        kept = {state for state in self.states if state not in hosted}

        def needs_device(node: fx.Node) -> bool:
            values = (node, *self.needs[node])
            return any(value in self.weights or self.owner.get(value) in kept for value in values) or _collective(node)

        device = self._reached(needs_device, lambda node: node not in tail)
        if not tail:
            device = set(self.nodes)
        both = self._states_of(device) & hosted
        if both:
            raise TraceError(
                f"the state {min(both, key=self.order.__getitem__).name} is read by operators of the host "
                f"({', '.join(sorted(str(target) for target in self.host))}) and by the device: it can be in one place"
            )
        light = {node for node in self.nodes if node not in tail and node not in device}
        on_host = self._reached(lambda node: bool(self._states_of([node]) & hosted), light.__contains__)
        body = self._closed(device, lambda node: node in on_host)
        into = self._ordered({value for node in body for value in node.all_input_nodes} - body)
        head = self._closed([node for node in into if node.op != "placeholder"], lambda node: node in device)
        returned = {value for value in self.results if isinstance(value, fx.Node)}
        ends: set[fx.Node] = set()
        if tail:
            filled = {writer for value in returned for maker in self.memory[value] for writer in self._writers(maker)}
            ends = self._closed(tail | (returned | filled) - device, lambda node: node in device)
        into = [node for node in into if node.op != "placeholder"]
        read = {value for node in ends for value in node.all_input_nodes} & body - ends
        out = self._ordered(read | (returned & body - ends))
        self._check([*into, *read], set())
        self._check(out, body)
        self._check_snapshots(body, head, into)
        return self._parts(head, body, ends, into, out, hosted)

    def _writers(self, maker: fx.Node) -> list[fx.Node]:
        return self.writers.get(maker, [])

    def _ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def _check(self, crossing: Sequence[fx.Node], allowed: set[fx.Node]) -> None:
        """Check that values passed between the sides are final: nothing writes to them afterwards, except the nodes
        ``allowed``."""
        for node in crossing:
            for maker in self.memory[node]:
                late = [writer for writer in self._writers(maker) if self.order[writer] > self.order[node]]
                late = [writer for writer in late if writer not in allowed]
                if late:
                    raise TraceError(
                        f"{node.name} goes from the host to the device, or back, and {late[0].name} ({late[0].target}) "
                        "changes it later: make a copy of it first"
                    )

    def _check_snapshots(self, body: set[fx.Node], head: set[fx.Node], into: Sequence[fx.Node]) -> None:
        known = body | head | set(into)
        for node in body:
            for needed in self.needs[node]:
                if needed.op != "placeholder" and needed not in known:
                    raise TraceError(f"{node.name} runs on the device after {needed.name}, which is the host's")

    def _parts(
        self,
        head: set[fx.Node],
        body: set[fx.Node],
        tail: set[fx.Node],
        into: Sequence[fx.Node],
        out: Sequence[fx.Node],
        hosted: set[fx.Node],
    ) -> Split:
        names: dict[fx.Node, str] = {place: f"given_{number}" for number, place in enumerate(self.places)}
        names.update((node, f"made_{number}") for number, node in enumerate(dict.fromkeys([*into, *out])))
        last = [value for value in dict.fromkeys(self.results) if isinstance(value, fx.Node) and value in tail]
        names.update((node, f"result_{number}") for number, node in enumerate(last))
        return Split(
            head=self._part(head, into, names),
            body=self._part(body, out, names),
            tail=self._part(tail, last, names),
            given=[names[place] for place in self.places],
            results=[names[value] for value in self.results],
            host_states=[number for number, state in enumerate(self.states) if state in hosted],
        )

    def _part(self, nodes: set[fx.Node], gives: Sequence[fx.Node], names: Mapping[fx.Node, str]) -> Part:
        used = {value for node in nodes for value in tensors_of([node.args, node.kwargs])}
        takes = self._ordered({node for node in used if node not in nodes and node.op != "get_attr"})
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in takes:
            values[node] = graph.placeholder(names[node])
            values[node].meta = dict(node.meta)
        for node in self._ordered(nodes):
            values[node] = graph.node_copy(node, lambda n: values[n])
        graph.output(tuple(values[node] for node in gives))
        return Part(Nodes(self.module, graph), [names[node] for node in takes], [names[node] for node in gives])


def _collective(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "nxd" and "axis" in str(node.target._schema)  # pyright: ignore
