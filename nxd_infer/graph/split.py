"""Split a graph between the host and a device at named operators: what these need and what follows is derived from the
data flow.

Three parts run one after the other. The *head*, on the host, computes the device's inputs that depend on the host's
states (the ids of a step's tokens, some of which are the last sampled ones). The *body*, on the device, holds
everything that reads a weight or a state of the device. The *tail*, on the host again, is the named operators and what
depends on them: penalties, the sampler, the token memory. Nodes that read only inputs are computed wherever they are
needed. A state belongs entirely to the host or to the device. A graph without a named operator is all body.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from nxd_infer.errors import TraceError
from nxd_infer.graph.flow import Flow, collective
from nxd_infer.graph.passes import Nodes, tensors_of


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


def split_at(module: fx.GraphModule, states: int, inputs: int, host: Collection[Any]) -> Split:
    """Split a functional graph with ``states`` states and ``inputs`` inputs at the operators in ``host``.

    Raises TraceError if a state, or a value passed between the sides, would have to be in both places.
    """
    return _Splitter(module, states, inputs, frozenset(host)).split()


class _Splitter(Flow):
    def __init__(self, module: fx.GraphModule, states: int, inputs: int, host: frozenset[Any]):
        super().__init__(module, states, inputs)
        self.host = host

    def split(self) -> Split:
        tail = self.reached(lambda node: node.target in self.host, lambda node: True)
        hosted = self.states_of(tail)
        kept = {state for state in self.states if state not in hosted}
        weights = set(self.weights)

        def needs_device(node: fx.Node) -> bool:
            values = (node, *self.needs[node])
            return any(value in weights or self.owner.get(value) in kept for value in values) or collective(node)

        device = self.reached(needs_device, lambda node: node not in tail)
        if not tail:
            device = set(self.nodes)
        both = self.states_of(device) & hosted
        if both:
            raise TraceError(
                f"the state {min(both, key=self.order.__getitem__).name} is read by operators of the host "
                f"({', '.join(sorted(str(target) for target in self.host))}) and by the device: it can be in one place"
            )
        light = {node for node in self.nodes if node not in tail and node not in device}
        on_host = self.reached(lambda node: bool(self.states_of([node]) & hosted), light.__contains__)
        body = self.closed(device, lambda node: node in on_host)
        into = self.ordered({value for node in body for value in node.all_input_nodes} - body)
        head = self.closed([node for node in into if node.op != "placeholder"], lambda node: node in device)
        returned = {value for value in self.results if isinstance(value, fx.Node)}
        ends: set[fx.Node] = set()
        if tail:
            filled = {writer for value in returned for maker in self.memory[value] for writer in self.writers_of(maker)}
            ends = self.closed(tail | (returned | filled) - device, lambda node: node in device)
        into = [node for node in into if node.op != "placeholder"]
        read = {value for node in ends for value in node.all_input_nodes} & body - ends
        out = self.ordered(read | (returned & body - ends))
        self._check([*into, *read], set())
        self._check(out, body)
        self._check_snapshots(body, head, into)
        return self._parts(head, body, ends, into, out, hosted)

    def _check(self, crossing: Sequence[fx.Node], allowed: set[fx.Node]) -> None:
        """Check that values passed between the sides are final: nothing writes to them afterwards, except the nodes
        ``allowed``."""
        for node in crossing:
            for maker in self.memory[node]:
                late = [writer for writer in self.writers_of(maker) if self.order[writer] > self.order[node]]
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
        takes = self.ordered({node for node in used if node not in nodes and node.op != "get_attr"})
        graph, values = self.copied({node: names[node] for node in takes}, nodes)
        graph.output(tuple(values[node] for node in gives))
        return Part(Nodes(self.module, graph), [names[node] for node in takes], [names[node] for node in gives])
