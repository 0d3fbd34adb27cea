"""Building blocks of passes; they change the given module, so a pass works on a copy (:func:`copied`).

They work on a plain ``fx`` graph whose placeholders are states, inputs and weights, and whose nodes carry a fake
tensor in ``meta["val"]``. Order matters: nested graphs are flattened first, so that every later pass sees all nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from nxd_infer.errors import TraceError
from nxd_infer.util.dtypes import dtype_name

aten = torch.ops.aten

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
"""Operators in which ranks wait for one another; their order must be the same on all ranks."""


class Nodes(fx.GraphModule):
    """A graph that is never called: skips generating its Python code, which takes longer than a pass."""

    def recompile(self) -> Any:
        """Do nothing."""


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph, including nested ones, for a pass to change, so that the original stays as it is."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    root = torch.nn.Module()
    for node in module.graph.nodes:
        values[node] = graph.node_copy(node, lambda n: values[n])
        if node.op == "get_attr":
            root.add_module(str(node.target), copied(getattr(module, str(node.target))))
    return Nodes(root, graph)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def output_of(graph: fx.Graph) -> Any:
    return next(node for node in reversed(graph.nodes) if node.op == "output")


def tensors_of(value: Any) -> list[fx.Node]:
    """Return the nodes in an argument, at any depth."""
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def inline(
    node: fx.Node, body: fx.GraphModule, args: Iterable[Any], copied: Callable[[fx.Node], None] = lambda node: None
) -> None:
    """Replace ``node`` by the nodes of ``body`` called on ``args``; a tuple result is read through its getitems.

    ``copied`` is called with each new node.
    """
    graph = node.graph
    values: dict[fx.Node, Any] = {}
    arguments = iter(args)
    result: Any = None
    with graph.inserting_before(node):
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(arguments)
            elif inner.op == "output":
                result = fx.map_arg(inner.args[0], lambda n: values[n])
            elif inner.op == "get_attr":
                values[inner] = _move_attribute(node, body, inner)
            else:
                values[inner] = graph.node_copy(inner, lambda n: values[n])
                copied(values[inner])
    if isinstance(result, (tuple, list)):
        for user in list(node.users):
            if user.target is not operator.getitem:
                raise TraceError(f"the result of the nested graph {node.name} is used whole by {user.name}")
            index: Any = user.args[1]
            user.replace_all_uses_with(result[index])
            graph.erase_node(user)
    elif result is not None:
        node.replace_all_uses_with(result)
    graph.erase_node(node)


def _move_attribute(node: fx.Node, body: fx.GraphModule, inner: fx.Node) -> fx.Node:
    owner: Any = node.graph.owning_module
    value = nested_graph(body, inner.target)
    if value is None:
        raise TraceError(
            f"a nested graph holds the tensor {inner.target!r}: make it outside of the operator, or register it"
        )
    name = f"nested_{len(list(owner.children()))}"
    owner.add_module(name, value)
    return node.graph.get_attr(name)


def retrace(function: Callable[..., Any], args: Iterable[Any], *, pre_dispatch: bool = True) -> fx.GraphModule:
    """Trace ``function`` on the fake values of ``args`` (nodes or constants; only nodes become placeholders)."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import make_fx

    flat = list(args)
    nodes = tensors_of(flat)
    fakes = [n.meta["val"] for n in nodes]

    def call(*values: Any) -> Any:
        table = dict(zip(nodes, values, strict=True))
        return function(*fx.map_arg(flat, lambda n: table[n]))

    mode = next((f.fake_mode for f in fakes if isinstance(f, FakeTensor)), None)
    if mode is None:
        raise TraceError("an operator to inline has no tensor argument")
    with torch.no_grad(), mode:
        return make_fx(call, pre_dispatch=pre_dispatch)(*fakes)


def flatten_nested(module: fx.GraphModule) -> None:
    """Inline the nested graphs of ``torch.no_grad`` and ``torch.autocast`` regions; autocast becomes explicit casts."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        name = node.target.__name__
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            continue
        at = 1 if name == "wrap_with_set_grad_enabled" else 4
        body = getattr(module, str(node.args[at].target))
        args = list(node.args[at + 1 :])
        if name == "wrap_with_set_grad_enabled":
            flatten_nested(body)
        else:
            # Nested regions run during the retrace, with their own settings.
            body = retrace(_under_autocast(body, *node.args[:3]), args, pre_dispatch=False)
            args = tensors_of(args)
        inline(node, body, args)
    module.graph.eliminate_dead_code(is_impure_node=lambda n: n.op != "get_attr")
    for branch in branches(module):
        flatten_nested(branch)


def _under_autocast(body: fx.GraphModule, device: Any, dtype: Any, enabled: Any) -> Callable[..., Any]:
    def run(*values: Any) -> Any:
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            return fx.Interpreter(body).run(*values)

    return run


def nested_graph(module: fx.GraphModule, path: Any) -> fx.GraphModule | None:
    """Return the graph that the attribute ``path`` of ``module`` is; None if it is another thing."""
    value = operator.attrgetter(str(path))(module)
    return value if isinstance(value, fx.GraphModule) else None


def branches(module: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the nested graphs that remain nested: the branches of ``torch.cond``."""
    nested = [nested_graph(module, node.target) for node in module.graph.nodes if node.op == "get_attr"]
    return [graph for graph in nested if graph is not None]


def native_operator(library: Any, name: str) -> Any | None:
    """Return ``library``'s operator called ``name``, or None."""
    if library is None or name not in library.ops:
        return None
    target = library.op(name)
    return target.default if isinstance(target, torch._ops.OpOverloadPacket) else target


def insert_operators(module: fx.GraphModule, library: Any, composite: Mapping[Any, Callable[..., Any]]) -> bool:
    """Replace ``nxd::`` operators by native ones; inline composites without one. Return whether any is native."""
    native = False
    changed = True
    while changed:
        changed = False
        for node in list(module.graph.nodes):
            target = node.target
            if node.op != "call_function" or getattr(target, "namespace", None) != "nxd":
                continue
            name = target._schema.name.partition("::")[2]
            replacement = native_operator(library, name)
            if replacement is not None:
                node.target = replacement
                native = True
            elif target in composite:
                args = _positional(node)
                inline(node, retrace(composite[target], args), tensors_of(args))
                changed = True
    # Not a generator, because every branch must be visited.
    return any([insert_operators(branch, library, composite) for branch in branches(module)]) or native  # noqa: C419


def _positional(node: fx.Node) -> list[Any]:
    """Return all arguments of an operator call in the order of its schema, including defaults."""
    out = []
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if i < len(node.args):
            out.append(node.args[i])
        else:
            out.append(node.kwargs.get(argument.name, argument.default_value))
    return out


# --- aliasing and mutation ----------------------------------------------------------------------------


def memory(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return, for each node, the nodes that created the memory its value may share: placeholders, and nodes that create
    a tensor. By the operators' schemas, and by the fake tensors: the schemas of some (``type_as``, ``einsum``,
    ``meshgrid``, dropout in evaluation mode) do not say that they return a view, or their argument itself. What
    ``torch.tensor`` copies is traced without the copy, and recorded with it."""
    shared: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        shared[node] = set()
        if node.target is operator.getitem:
            shared[node] = set(shared[node.args[0]])
        elif isinstance(node.target, torch._ops.OpOverload):
            schema = node.target._schema
            if any(r.alias_info is not None for r in schema.returns):
                for argument, value in _arguments(node):
                    if argument.alias_info is not None:
                        for source in tensors_of(value):
                            shared[node] |= shared[source]
            own = set() if node.target is aten.lift_fresh_copy.default else storages(node)
            for source in node.all_input_nodes:
                if not own.isdisjoint(storages(source)):
                    shared[node] |= shared[source]
        shared[node] = shared[node] or {node}
    return shared


def storages(node: fx.Node) -> set[int]:
    """Return keys of the memory of a node's fake tensors, which are equal for views of the same memory."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return {tensor.untyped_storage()._cdata for tensor in values if isinstance(tensor, torch.Tensor)}


def aliases(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """Return, for each node, the placeholders whose memory its value may share."""
    return {node: {maker for maker in makers if maker.op == "placeholder"} for node, makers in memory(graph).items()}


def _arguments(node: fx.Node) -> Iterable[tuple[Any, Any]]:
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def written(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory ``node`` writes."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    return [
        source
        for argument, value in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for source in tensors_of(value)
    ]


def mutated_placeholders(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders that a run of the graph changes."""
    shared = aliases(graph)
    return {base for node in graph.nodes for target in written(node) for base in shared[target]}


# --- rewriting ----------------------------------------------------------------------------------------

_IDENTITY = {aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default}
_NOTHING = {"_assert_tensor_metadata", "sym_constrain_range", "sym_constrain_range_for_size"}


def simplify(module: fx.GraphModule) -> None:
    """Remove what has no effect in inference: detach, dropout in evaluation mode, metadata assertions, self copies."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = node.target in _IDENTITY
        same |= node.target is aten.dropout.default and node.args[2] is False
        same |= node.target is aten.copy_.default and node.args[0] is node.args[1]
        if same:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif not node.users and getattr(node.target, "_opname", "") in _NOTHING:
            graph.erase_node(node)
        elif getattr(node.target, "_opname", "") == "_assert_scalar" and _is_size_check(node.args[0]):
            size, check = node.args[0].args[0], node.args[0]
            for done in (node, check, size):
                if not done.users:
                    graph.erase_node(done)


def _is_size_check(check: Any) -> bool:
    """Whether ``check`` is the exporter's own, of what an operator says of the size of its result."""
    compared = isinstance(check, fx.Node) and check.target in (operator.ge, operator.le)
    return compared and getattr(check.args[0], "target", None) is aten.sym_size.int


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call and compute its fake value, in the fake mode of its arguments (or of ``like``)."""
    node = graph.call_function(target, args, kwargs)
    source = like or tensors_of(args)[0]
    with torch.no_grad(), source.meta["val"].fake_mode:
        fill = lambda value: fx.map_arg(value, lambda n: n.meta["val"])  # noqa: E731
        # Written arguments are fake too, so an in-place call on them changes nothing real.
        node.meta["val"] = target(*fill(args), **fill(kwargs))
    return node


def clone_aliased_outputs(module: fx.GraphModule) -> None:
    """Give every output its own memory: an output that is (a view of) a state or input would change after the call."""
    graph = module.graph
    shared = aliases(graph)
    output = output_of(graph)
    seen: set[fx.Node] = set()
    results = []
    for value in output.args[0]:
        if isinstance(value, fx.Node) and (shared[value] or value in seen):
            with graph.inserting_before(output):
                value = call(graph, aten.clone.default, value, memory_format=torch.contiguous_format)
        elif isinstance(value, fx.Node):
            seen.add(value)
        results.append(value)
    output.args = (tuple(results),)


def eliminate_dead_code(module: fx.GraphModule) -> None:
    """Remove unused pure operators, including unused collectives, as a compiler would, before they are recorded."""

    def keep(node: fx.Node) -> bool:
        if node.op in ("placeholder", "output"):
            return True
        if node.op == "get_attr":
            return False
        return not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable

    module.graph.eliminate_dead_code(is_impure_node=lambda n: keep(n) and n.target is not operator.getitem)


def collective_sequence(module: fx.GraphModule) -> list[str]:
    """Return the collective calls in order, as text: operator, axis and arguments, dtype and shape."""
    calls: list[str] = []
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        namespace, _, name = node.target._schema.name.partition("::")
        if name in COLLECTIVES and (namespace == "nxd" or namespace.startswith("nxd_")):
            value = node.args[0].meta["val"]
            dtype = dtype_name(value.dtype)
            rest = ", ".join(str(a) for a in node.args[1:])
            calls.append(f"{name}({dtype}{list(value.shape)}, {rest})")
    for branch in branches(module):
        calls += [f"in a branch: {call}" for call in collective_sequence(branch)]
    return calls


# --- the functional form ------------------------------------------------------------------------------

# ``(states, inputs, weights) -> (outputs, new states)``: a state that changes is copied first, and the model's writes
# go to the copy. So a graph writes only to tensors that it created itself; its caller passes the states and gets the
# next ones. The inverse removes these copies and restores the exported graph, node for node, so a backend that changes
# states in place pays nothing.

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
