"""Compute equal values once: the tables of a rotary embedding are made once, not in each layer."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from nxd_infer.graph.passes import memory, output_of


def steady(node: fx.Node, changing: set[fx.Node]) -> bool:
    """Whether neither ``node`` nor what it reads is written later."""
    return node not in changing and changing.isdisjoint(node.all_input_nodes)


def eliminate_common_subexpressions(graph: fx.Graph, changing: set[fx.Node]) -> None:
    """Merge nodes that compute the same. ``changing``: nodes whose memory is written after they have made it."""
    makers = memory(graph)
    returned = {maker for node in output_of(graph).all_input_nodes for maker in makers[node]}  # share no memory
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _repeatable(node) or not steady(node, changing) or not makers[node].isdisjoint(returned):
            continue
        first = known.setdefault((node.target, _key(node.args), _key(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _repeatable(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    plain = target.namespace == "aten" and not target._schema.is_mutable
    return plain and torch.Tag.nondeterministic_seeded not in target.tags


def _key(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in sorted(value.items()))
    # By its text: -0.0 is not 0.0. A node's is its name.
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else (type(value), str(value))
