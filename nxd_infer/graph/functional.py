"""The functional form of a graph, ``(states, inputs, weights) -> (outputs, new states)``, and the way back in place.

In the functional form a state that changes is copied first, and what the model writes goes into the copy: a graph
writes only into what it has made itself, so whoever runs it gives the states and gets the next ones. The way back
takes these copies out again, and the graph is the one that was exported, node for node: a backend whose states stay
where they are pays nothing.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from nxd_infer.graph.passes import aten, call, copied, mutated_placeholders

_COPY = aten.clone.default


def functional(module: fx.GraphModule, states: int) -> fx.GraphModule:
    """A graph whose first ``states`` placeholders are never written: behind the outputs it returns one new value for
    each, the placeholder itself where nothing writes it."""
    module = copied(module)
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
        values.append(value)
    output = output_of(graph)
    output.args = ((*output.args[0], *values),)
    return module


def in_place(module: fx.GraphModule, states: int) -> fx.GraphModule:
    """The inverse of :func:`functional`: the states are changed where they are, and only the outputs returned."""
    module = copied(module)
    graph = module.graph
    output = output_of(graph)
    results: Any = output.args[0]
    count = len(results) - states
    output.args = (tuple(results[:count]),)
    computed: list[tuple[fx.Node, fx.Node]] = []
    for place, value in zip(placeholders(graph)[:states], results[count:], strict=True):
        if value.target is _COPY and value.args == (place,) and len(place.users) == 1:
            value.replace_all_uses_with(place)
            graph.erase_node(value)
        elif value is not place:
            computed.append((place, value))
    with graph.inserting_before(output):  # by a pass, in another way: all are there before the first is overwritten
        for place, value in [(place, call(graph, _COPY, value)) for place, value in computed]:
            call(graph, aten.copy_.default, place, value)
    return module


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: fx.Graph) -> Any:
    return next(node for node in reversed(graph.nodes) if node.op == "output")
