"""The functional form of a graph, ``(states, inputs, weights) -> (outputs, new states)``, and its inverse.

In functional form a state that changes is copied first, and the model's writes go to the copy. So a graph writes only
to tensors that it created itself; its caller passes the states and gets the next ones. The inverse removes these copies
and restores the exported graph, node for node, so a backend that changes states in place pays nothing.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from nxd_infer.graph.passes import aten, call, copied, mutated_placeholders, output_of, placeholders

_COPY = aten.clone.default


def functional(module: fx.GraphModule, states: int) -> fx.GraphModule:
    """Change a graph so that its first ``states`` placeholders are never written, and return it: after the outputs it
    returns the new value of each, which is the placeholder itself if nothing writes it."""
    graph = module.graph
    places = placeholders(graph)[:states]
    changed = mutated_placeholders(graph)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    values = []
    for place in places:
        value = place
        if place in changed:
            with graph.inserting_before(first):
                value = call(graph, _COPY, place)
            place.replace_all_uses_with(value, delete_user_cb=lambda user, own=value: user is not own)
            _exchange_fakes(place, value)
        values.append(value)
    output = output_of(graph)
    output.args = ((*output.args[0], *values),)
    return module


def in_place(module: fx.GraphModule, states: int) -> fx.GraphModule:
    """Invert :func:`functional`: the states are changed in place, and only the outputs are returned."""
    module = copied(module)
    graph = module.graph
    output = output_of(graph)
    results: Any = output.args[0]
    count = len(results) - states
    output.args = (tuple(results[:count]),)
    computed: list[tuple[fx.Node, fx.Node]] = []
    for place, value in zip(placeholders(graph)[:states], results[count:], strict=True):
        if value.target is _COPY and value.args == (place,) and len(place.users) == 1:
            _exchange_fakes(place, value)
            value.replace_all_uses_with(place)
            graph.erase_node(value)
        elif value is not place:
            computed.append((place, value))
    with graph.inserting_before(output):  # values that a pass changed: copy all before overwriting the first state
        for place, value in [(place, call(graph, _COPY, value)) for place, value in computed]:
            call(graph, aten.copy_.default, place, value)
    return module


def _exchange_fakes(first: fx.Node, second: fx.Node) -> None:
    """Exchange two equal nodes' fake tensors, so that they share memory with those of the nodes that now use them."""
    first.meta["val"], second.meta["val"] = second.meta["val"], first.meta["val"]
