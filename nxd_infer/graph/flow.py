"""The data flow of a functional graph, for passes that split it: what each node needs, and whose state it touches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from nxd_infer.graph.passes import memory, output_of, placeholders, written


class Flow:
    """What the nodes of ``module`` need; its placeholders are ``states`` states, ``inputs`` inputs, and weights."""

    def __init__(self, module: fx.GraphModule, states: int, inputs: int):
        self.module = module
        self.nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        self.places = placeholders(module.graph)
        self.states = self.places[:states]
        self.inputs = self.places[states : states + inputs]
        self.weights = self.places[states + inputs :]
        self.order = {node: place for place, node in enumerate(module.graph.nodes)}
        self.memory = memory(module.graph)
        self.results: list[Any] = list(output_of(module.graph).args[0])
        """Outputs, then new states."""
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        """The nodes that write to the memory that a node created, in order."""
        self.needs = self._dependencies()
        """What must run before each node: its arguments, and earlier writes to their memory."""
        self.owner = self._owners()
        """The state of each node that is one, or shares memory with its copy."""

    def _dependencies(self) -> dict[fx.Node, set[fx.Node]]:
        needs: dict[fx.Node, set[fx.Node]] = {}
        for node in self.nodes:
            own = set(node.all_input_nodes)
            makers = {maker for value in own for maker in self.memory[value]}
            needs[node] = own | {writer for maker in makers for writer in self.writers_of(maker)}
            for target in written(node):
                for maker in self.memory[target]:
                    self.writers.setdefault(maker, []).append(node)
        return needs

    def _owners(self) -> dict[fx.Node, fx.Node]:
        copies: dict[fx.Node, fx.Node] = {state: state for state in self.states}
        for state in self.states:
            copies.update((user, state) for user in state.users if user.target is torch.ops.aten.clone.default)
        owner = dict(copies)
        for node in self.nodes:
            owner.update((node, copies[maker]) for maker in self.memory[node] if maker in copies)
        return owner

    def writers_of(self, maker: fx.Node) -> list[fx.Node]:
        return self.writers.get(maker, [])

    def reached(self, start: Callable[[fx.Node], bool], among: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """Return the nodes in ``among`` for which ``start`` holds, or that depend on such a node."""
        nodes: set[fx.Node] = set()
        for node in self.nodes:
            if among(node) and (start(node) or not nodes.isdisjoint(self.needs[node])):
                nodes.add(node)
        return nodes

    def closed(self, seeds: Iterable[fx.Node], stop: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """Return ``seeds`` and everything they need, up to the nodes where ``stop`` holds."""
        nodes: set[fx.Node] = set()
        pending = list(seeds)
        while pending:
            node = pending.pop()
            if node.op != "placeholder" and node not in nodes and not stop(node):
                nodes.add(node)
                pending += self.needs[node]
        return nodes

    def states_of(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Return the states that these nodes read or write."""
        return {self.owner[value] for node in nodes for value in (node, *self.needs[node]) if value in self.owner}

    def ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def copied(self, takes: Mapping[fx.Node, str], nodes: Iterable[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """Return a graph without an output, of placeholders for ``takes`` with these names and of copies of ``nodes``,
        and what stands for each of them in it."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node, name in takes.items():
            values[node] = graph.placeholder(name)
            values[node].meta = dict(node.meta)
        for node in self.ordered(nodes):
            values[node] = graph.node_copy(node, lambda n: values[n])
        return graph, values


def collective(node: fx.Node) -> bool:
    """Whether ranks wait for one another in this node."""
    return getattr(node.target, "namespace", "") == "nxd" and "axis" in str(node.target._schema)  # pyright: ignore
