"""Update states in place, so that a write into a state of 128 MB does not copy it."""

from __future__ import annotations

from typing import Any

from torch import fx

from nxd_infer.graph.passes import aliases, aten, tensors_of, written

_IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.masked_fill.Scalar: aten.masked_fill_.Scalar,
    aten.masked_fill.Tensor: aten.masked_fill_.Tensor,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}


def update_in_place(module: fx.GraphModule) -> None:
    """Turn ``copy_(state, index_put(state, ...))`` into ``index_put_(state, ...)`` if nothing reads the old value.

    A chain of such updates is changed as a whole. Without this pass a state of 128 MB would be copied twice per call.
    """
    graph = module.graph
    for copy in [n for n in graph.nodes if n.target is aten.copy_.default and n.args[0].op == "placeholder"]:
        state = copy.args[0]
        chain: list[fx.Node] = []
        link = copy.args[1]
        while link.op == "call_function" and link.target in _IN_PLACE and (not chain or len(link.users) == 1):
            chain.append(link)
            link = link.args[0]
        if link is not state or not chain:
            continue
        chain.reverse()
        order = {node: place for place, node in enumerate(graph.nodes)}
        shared = aliases(graph)
        old_value = {node for node, bases in shared.items() if state in bases}
        if any(value in old_value for node in chain for value in tensors_of(node.args[1:])):
            continue  # an update that takes its new entries, or their places, from the old value
        readers = {user for node in old_value for user in node.users if user.op == "call_function"}
        readers -= {*chain, copy}
        others = [node for node in graph.nodes if node is not copy and any(state in shared[w] for w in written(node))]
        late = [reader for reader in readers if order[reader] > order[chain[0]]]
        returned = any(user.op == "output" for node in old_value for user in node.users)
        if others or late or returned or copy.users:
            continue
        for node in chain:
            node.target = _IN_PLACE[node.target]
        graph.erase_node(copy)
