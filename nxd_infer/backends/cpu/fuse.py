"""Fuse element-wise operators, and reductions over the last dimension, into calls of one operator.

Between two matrix products a transformer does little arithmetic in many operators: a norm with the addition before it,
a rotary embedding, a gate. Each such group becomes a call of ``fused`` (:mod:`nxd_infer.ops.fused`), whoever wrote the
model: a group is found by what its operators are, not by a pattern of them. A single operator is one, too: its call is
planned, and the rank's own threads share its work. The values of a group have the same dimensions but the last, and
nothing between its first and its last operator reads what it computes.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from torch import fx

from nxd_infer.backends.cpu.common_subexpressions import eliminate_common_subexpressions, steady
from nxd_infer.backends.cpu.fusible import NAMES, Writer, fusible, is_view, memory_order, shape
from nxd_infer.graph.passes import branches, call, memory, native_operator, tensors_of, written

_MOST = 256
"""Nodes of a group, each with what it reads: a program has at most 4096 values."""


def fuse(module: fx.GraphModule, library: Any) -> bool:
    """Compute equal values once, and fuse what can be fused. Return whether anything was fused."""
    fused = native_operator(library, "fused")
    if fused is None:
        return False
    inner = [fuse(branch, library) for branch in branches(module)]
    changing = _changing(module.graph)
    eliminate_common_subexpressions(module.graph, changing)
    groups = _groups(module.graph, changing)
    for group in groups:
        _replace(group, fused)
    return bool(groups) or any(inner)


def _changing(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose memory is written after they have made it."""
    makers = memory(graph)
    changed = {maker for node in graph.nodes for target in written(node) for maker in makers[target]}
    return {node for node, own in makers.items() if not own.isdisjoint(changed)}


@dataclass(eq=False)
class _Group:
    nodes: list[fx.Node]
    """In the order of the graph."""

    def __post_init__(self) -> None:
        self.members = set(self.nodes)
        self.operators = [node for node in self.nodes if not is_view(node)]
        self.kept: set[fx.Node] = set()
        """Views that others use, too: they stay, and view what the group reads or returns."""
        for node in reversed(self.nodes):
            if is_view(node) and any(user not in self.members or user in self.kept for user in node.users):
                self.kept.add(node)

    def computed(self, node: fx.Node) -> bool:
        """Whether a member is more than a view of what the group reads."""
        while node in self.members and is_view(node):
            node = node.all_input_nodes[0]
        return node in self.members

    def fits(self, end: int, order: dict[fx.Node, int]) -> bool:
        """Whether one operator can compute the group: others read what it computes only after the place ``end``; it
        reads tensors, not lists of them; it is not too large."""
        computed = (node for node in self.nodes if self.computed(node))
        late = all(user in self.members or order[user] > end for node in computed for user in node.users)
        whole = all(node.target is not operator.getitem or node.args[0] in self.members for node in self.nodes)
        return late and whole and sum(1 + len(tensors_of(node.args)) for node in self.nodes) <= _MOST


def _groups(graph: fx.Graph, changing: set[fx.Node]) -> list[_Group]:
    order = {node: place for place, node in enumerate(graph.nodes)}
    group_of: dict[fx.Node, _Group] = {}
    for node in graph.nodes:
        if not fusible(node) or not steady(node, changing):
            continue
        sources = [group_of[source] for source in node.all_input_nodes if source in group_of]
        near = [group for group in dict.fromkeys(sources) if _outer(group.nodes[0]) == _outer(node)]
        choices = [near, *([group] for group in near), []]
        for chosen in choices:
            nodes = [member for group in chosen for member in group.nodes]
            joined = _Group(sorted([*nodes, node], key=order.__getitem__))
            if joined.fits(order[node], order):
                group_of.update((member, joined) for member in joined.nodes)
                break
    return [group for group in dict.fromkeys(group_of.values()) if group.operators]


def _outer(node: fx.Node) -> tuple[int, ...]:
    return tuple(shape(node)[:-1])


def _replace(group: _Group, fused: Any) -> None:
    """Call ``fused`` in place of a group's operators."""
    graph, writer = group.nodes[0].graph, Writer()
    read: set[fx.Node] = set()
    for node in reversed(group.nodes):
        if node in group.operators or node in read:
            read.update(node.all_input_nodes)
    inputs = [source for node in group.nodes for source in node.all_input_nodes if source not in group.members]
    inputs = [source for source in dict.fromkeys(inputs) if source in read]
    for source in inputs:
        writer.input(source)
    for node in group.nodes:
        if node in group.operators or node in read:
            writer.write(node)
    outputs = [
        node for node in group.operators if any(user not in group.members or user in group.kept for user in node.users)
    ]
    moved = [node for node in group.nodes if node in group.kept and group.computed(node)]
    with graph.inserting_after(group.nodes[-1]):
        last = made = call(graph, fused, inputs, _program(group, writer, inputs, outputs))
    for index, node in enumerate(outputs):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (made, index))
        last.meta["val"] = made.meta["val"][index]
        node.replace_all_uses_with(last, lambda user: user not in group.members or user in group.kept)
    for node in moved:
        last.append(node)
        last = node
    for node in reversed(group.nodes):
        if not node.users:
            graph.erase_node(node)


def _program(group: _Group, writer: Writer, inputs: list[fx.Node], outputs: list[fx.Node]) -> str:
    outer = _outer(group.nodes[0])
    head = [len(outer), *outer]
    for source in inputs:
        *some, width = shape(source) or (1,)
        same = math.prod(outer) > 1 == math.prod(some)
        head += [*(["same"] if same else []), NAMES[source.meta["val"].dtype], width]
    results = ["->"]
    for node in outputs:
        results += [writer.returned(node), *memory_order(node.meta["val"])]
    return " ; ".join([" ".join(map(str, head)), *writer.statements, " ".join(map(str, results))])
