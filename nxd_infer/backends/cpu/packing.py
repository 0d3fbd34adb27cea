"""Which weights a CPU backend stores packed, and the operators that read packed weights.

An encoding is chosen once per weight, over all buckets of a rank: packed only if every use in every bucket is a
linear, ``x @ W.T (+ b)`` in one of the forms that export leaves of it, or (of a table that is a linear's weight too) an
embedding; or if every use is ``x @ W (+ b)``, of its transpose; or if every use is ``expert_linear``, or every use is
that of its transpose. Otherwise the weight stays plain everywhere. Values do not matter, so ranks with equal graphs
agree. A trace that quantises rounds all but those of a transpose: a tied table, too, so that there is one copy of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from nxd_infer.artifact.manifest import WeightSpec
from nxd_infer.backends.cpu.encodings import (
    PACKED,
    PACKED_ACROSS,
    PACKED_STORED,
    ROUNDED,
    form_beside,
    held_shape,
    int4_form,
)
from nxd_infer.graph.canonical import Graph, weight_nodes
from nxd_infer.graph.passes import call, native_operator, placeholders, tensors_of, written
from nxd_infer.graph.stages import HANDED
from nxd_infer.ops.packed import DTYPES, packable

aten = torch.ops.aten

_LINEAR = aten.linear.default
_EMBEDDING = aten.embedding.default
_PRODUCTS = {aten.mm.default, aten.matmul.default}
_EXPERTS = torch.ops.nxd.expert_linear.default
_COND = torch.ops.higher_order.cond


@dataclass
class Use:
    """One node that reads a weight: ``x @ W.T + bias``, or rows of it (``ids``); of experts, with those of the rows."""

    node: fx.Node
    weight: fx.Node
    """The placeholder, of the graph that the node is in."""
    x: fx.Node | None = None
    bias: fx.Node | None = None
    ids: fx.Node | None = None
    across: bool = False
    """``x @ W + bias`` instead."""
    experts: fx.Node | None = None


def choose(
    buckets: Sequence[Mapping[str, fx.Node]], minimum: int, form: str = PACKED, heads: Collection[str] = ()
) -> dict[str, str]:
    """``{weight: form}`` for placeholders by weight name, one mapping per bucket; empty for a ``minimum`` of 0.
    Weights that are used across, and those that choose experts, have a form that rounds nothing; tables, experts and
    ``heads`` the one of :func:`form_beside`."""
    chosen: dict[str, str] = {}
    routers = _routers({weight.graph for bucket in buckets for weight in bucket.values()})
    for name in dict.fromkeys(name for bucket in buckets for name in bucket) if minimum else ():
        found = [uses(bucket[name]) for bucket in buckets if name in bucket]
        known = [use for some in found for use in some or ()]
        if all(some is not None for some in found) and any(use.x is not None for use in known):
            value = next(bucket[name] for bucket in buckets if name in bucket).meta["val"]
            across = {use.across for use in known}
            if value.dtype != torch.int8 and any(use.node in routers for use in known):
                chosen[name] = PACKED
            elif value.numel() * value.element_size() >= minimum and len(across) == 1:
                beside = value.dim() == 3 or name in heads or any(use.ids is not None for use in known)
                plain = PACKED_STORED if value.dtype == torch.int8 else form_beside(form) if beside else form
                chosen[name] = PACKED_ACROSS if across == {True} else plain
    return chosen


def _routers(graphs: Iterable[fx.Graph]) -> set[fx.Node]:
    """Return the linear layers that choose experts. These are packed whatever their size: a product of PyTorch's rounds
    a row differently in another batch, and the row might get other experts."""
    found, seen = set[fx.Node](), set[fx.Node]()
    waiting = [node.args[2] for graph in graphs for node in graph.nodes if node.target is _EXPERTS]
    while waiting:
        node = waiting.pop()
        if isinstance(node, fx.Node) and node not in seen:
            seen.add(node)
            if node.target is _LINEAR:
                found.add(node)
            else:
                waiting += node.all_input_nodes
    return found


def heads(graphs: Sequence[Graph]) -> set[str]:
    """Return the weights of linear layers whose results no other layer reads, in every bucket; a later pipeline stage
    reads what is handed to it. ``graphs``: canonical, where what is written to a state is a value."""
    found: dict[str, bool] = {}
    for graph in graphs:
        weights = weight_nodes(graph.module, graph.file)
        names = {use.node: name for name, weight in weights.items() for use in uses(weight) or () if use.x is not None}
        *_, output = graph.module.graph.nodes
        given = zip(output.args[0], graph.file.outputs, strict=False)  # pyright: ignore[reportArgumentType]
        handed = {node for node, spec in given if spec.name.startswith(HANDED)}
        read: set[fx.Node] = set()
        for node in reversed(graph.module.graph.nodes):
            layers = [user in names or isinstance(user.target, HigherOrderOperator) for user in node.users]
            if node in handed or any(layers) or not read.isdisjoint(node.users):
                read.add(node)
        for node, name in names.items():
            found[name] = found.get(name, True) and node.graph is graph.module.graph and node not in read
    return {name for name, last in found.items() if last}


def insert(weights: Mapping[str, fx.Node], encodings: Mapping[str, str], library: Any) -> bool:
    """Insert the operators on packed weights, native ones if there are; True if there was a use."""
    linears, embedding, experts = (
        native_operator(library, name) or getattr(torch.ops.nxd, name).default
        for name in ("packed_linears", "packed_embedding", "packed_experts")
    )
    replaced: dict[fx.Node, fx.Node] = {}
    for name, weight in weights.items():
        if form := encodings.get(name, ""):
            found = uses(weight) or ()
            if form != PACKED:
                _hold(weight, found, form)
            for use in found:
                _replace(use, linears, embedding, experts, replaced)
    for graph in dict.fromkeys(node.graph for node in replaced.values()):
        _join(graph, linears)
    return bool(replaced)


def encoded_spec(spec: WeightSpec, form: str) -> WeightSpec:
    """What a graph takes for a weight of ``spec`` in ``form``."""
    if form == PACKED_ACROSS:
        *several, rows, columns = spec.shape
        stride = [rows * columns] * len(several) + [rows, 1]
        return spec.model_copy(update={"encoding": form, "shape": [*several, columns, rows], "stride": stride})
    if form != PACKED_STORED and (form not in ROUNDED or spec.dtype == "int8"):  # as artifacts of format 1.0 have it
        return spec.model_copy(update={"encoding": form})
    shape = held_shape(spec.shape, form)
    stride = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    dtype = "int8" if int4_form(form) is None else "uint8"
    return spec.model_copy(update={"encoding": form, "dtype": dtype, "shape": shape, "stride": stride})


def _hold(weight: fx.Node, found: Iterable[Use], form: str) -> None:
    """Give the placeholders of a weight the type and shape of its packed form."""
    for node in {weight, *(use.weight for use in found)}:
        value = node.meta["val"]
        with value.fake_mode:
            if form in ROUNDED or form == PACKED_STORED:
                dtype = torch.int8 if int4_form(form) is None else torch.uint8
                node.meta["val"] = torch.empty(held_shape(value.shape, form), dtype=dtype)
            else:
                node.meta["val"] = value.new_empty(value.mT.shape)


def _join(graph: fx.Graph, linears: Any) -> None:
    """Make one call of all packed linears of one input: queries, keys and values; gate and up."""
    groups: list[list[fx.Node]] = []
    together: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and (written(node) or isinstance(node.target, HigherOrderOperator)):
            together = {}  # no linear moves across a write: it may be to what the linear reads
        if node.target is not linears:
            continue
        x, layers, _ = node.args
        weight, *bias = tensors_of(layers)
        if all(one.op == "placeholder" for one in bias):
            key = x, len(bias), weight.meta["val"].dtype
            if key not in together:
                groups.append(together.setdefault(key, []))
            together[key].append(node)
    for nodes in groups:
        if len(nodes) == 1:
            continue
        x, _, biased = nodes[0].args
        layers = [tensors_of(node.args[1]) for node in nodes]
        with graph.inserting_before(nodes[0]):
            joined = call(graph, linears, x, [one for kind in zip(*layers, strict=True) for one in kind], biased)
            parts = [call(graph, operator.getitem, joined, place, like=layers[0][0]) for place in range(len(nodes))]
        for node, part in zip(nodes, parts, strict=True):
            for user in list(node.users):
                user.replace_all_uses_with(part)
                graph.erase_node(user)
            graph.erase_node(node)


def uses(weight: fx.Node) -> list[Use] | None:
    """Return every use of ``weight``, or None if one of them is none of those above."""
    value = weight.meta.get("val")
    if value is None or not packable(value.dtype, value.shape, value.stride(), stored=True):
        return None
    found: list[Use] = []
    for node in weight.users:
        some = _uses_by(node, weight)
        if some is None:
            return None
        found += some
    return found


def _uses_by(node: fx.Node, weight: fx.Node) -> Iterable[Use] | None:
    """Return how ``node`` uses ``weight``; None if that use is unknown."""
    if node.op != "call_function":
        return None
    if weight.meta["val"].dim() == 3 and node.target is not _COND:
        readers = node.users if _transposes(node) else [node]
        if not all(reader.target is _EXPERTS and reader.args[1] in (weight, node) for reader in readers):
            return None
        across = node not in readers
        found = [Use(one, weight, _node(one.args[0]), across=across, experts=_node(one.args[2])) for one in readers]
        return found if all(_fits(use, weight) for use in found) else None
    if node.target is _LINEAR:
        x, at, *bias = node.args
        use = Use(node, weight, _node(x), _node(bias[0]) if bias else None)
        return [use] if at is weight and _fits(use, weight) else None
    if node.target is _EMBEDDING:
        ids = _node(node.args[1])
        return [Use(node, weight, ids=ids)] if node.args[0] is weight and ids is not None else None
    if node.target is aten.einsum.default:
        use = _einsum(node, weight)
        return [use] if use is not None and _fits(use, weight) else None
    if node.target is _COND:
        return _in_branches(node, weight)
    if (use := _product(node, weight, weight)) is not None:
        use.across = True
        return [use] if _fits(use, weight) else None
    if _transposes(node):
        found = [_product(user, node, weight) for user in node.users]
        good = [use for use in found if use is not None and _fits(use, weight)]
        return good if len(good) == len(found) else None
    return None


def _node(value: Any) -> fx.Node | None:
    return value if isinstance(value, fx.Node) else None


def _fits(use: Use, weight: fx.Node) -> bool:
    """The operands have the weight's type, and the weight is none of them. The bias, if any, is one row."""
    mine = weight.meta["val"]
    if use.x is None or use.x is weight or use.bias is weight:
        return False
    x = use.x.meta.get("val")
    if x is None or x.dtype not in ({mine.dtype} & DTYPES or DTYPES) or x.dim() < 1 or x.device.type != "cpu":
        return False
    bias = None if use.bias is None else use.bias.meta.get("val")
    return use.bias is None or (bias is not None and bias.dtype == mine.dtype)


def _transposes(node: fx.Node) -> bool:
    """Whether ``node`` is the transpose of a matrix, or of several, its first argument."""
    target, rest = node.target, node.args[1:]
    if target in (aten.t.default, aten.numpy_T.default, aten.mT.default):
        return node.meta["val"].dim() == 2 or target is aten.mT.default
    order = list(range(node.meta["val"].dim())) if "val" in node.meta else []
    if target in (aten.transpose.int, aten.swapaxes.default, aten.swapdims.default):
        return {order[int(dim)] for dim in rest} == set(order[-2:])  # pyright: ignore[reportArgumentType]
    return target is aten.permute.default and [order[int(dim)] for dim in rest[0]] == [*order[:-2], *order[:-3:-1]]  # pyright: ignore


def _product(node: fx.Node, transposed: fx.Node, weight: fx.Node) -> Use | None:
    """``node`` as ``x @ transposed`` or ``bias + x @ transposed``, or as a linear layer of ``transposed``."""
    if node.target is _LINEAR and node.args[1] is transposed and transposed is not weight:
        x, _, *bias = node.args
        return Use(node, weight, _node(x), _node(bias[0]) if bias else None, across=True)
    if node.target in _PRODUCTS and node.args[1] is transposed and node.args[0] is not transposed:
        return Use(node, weight, _node(node.args[0]))
    if node.target is aten.addmm.default and node.args[2] is transposed and transposed not in node.args[:2]:
        plain = all(node.kwargs.get(factor, 1) == 1 for factor in ("beta", "alpha")) and len(node.args) == 3
        return Use(node, weight, _node(node.args[1]), _node(node.args[0])) if plain else None
    return None


def _einsum(node: fx.Node, weight: fx.Node) -> Use | None:
    """``...k,nk->...n`` with any letters, in either order of the operands."""
    equation, operands = str(node.args[0]).replace(" ", ""), list(node.args[1])  # pyright: ignore
    inputs, arrow, result = equation.partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2 or len(operands) != 2 or (operands[0] is weight) == (operands[1] is weight):
        return None
    if operands[0] is weight:
        terms.reverse()
        operands.reverse()
    left, right = terms
    if len(right) != 2 or not right.isalpha() or right[0] == right[1]:
        return None
    n, k = right
    rest = left[:-1]
    letters = rest.removeprefix("...")
    if not left.endswith(k) or n in letters or k in letters or "." in letters or len(set(letters)) < len(letters):
        return None
    return Use(node, weight, _node(operands[0])) if result == rest + n else None


def _in_branches(node: fx.Node, weight: fx.Node) -> list[Use] | None:
    """Return the uses inside the branches of ``torch.cond``, whose operand the weight is."""
    owner: Any = node.graph.owning_module
    _, *names, operands = node.args
    found: list[Use] = []
    for name in names:
        branch = getattr(owner, str(getattr(name, "target", "")), None)
        if not isinstance(branch, fx.GraphModule):
            return None
        for place, operand in zip(placeholders(branch.graph), operands, strict=True):  # pyright: ignore[reportArgumentType]
            if operand is weight:
                some = uses(place)
                if some is None:
                    return None
                found += some
    return found


def _replace(use: Use, linears: Any, embedding: Any, experts: Any, replaced: dict[fx.Node, fx.Node]) -> None:
    """Call the packed operator in place of ``use.node``. What it leaves unused is dead code."""
    node, weight, graph = use.node, use.weight, use.node.graph
    x, bias, ids, chosen = (
        None if operand is None else replaced.get(operand, operand)
        for operand in (use.x, use.bias, use.ids, use.experts)
    )
    with graph.inserting_before(node):
        if chosen is not None:
            new = call(graph, experts, x, weight, chosen)
        elif ids is not None:
            new = call(graph, embedding, weight, ids, node.meta["val"].dtype == torch.bfloat16)
        else:
            row = bias is not None and list(bias.meta["val"].shape) == [weight.meta["val"].shape[0]]
            results = call(graph, linears, x, [weight, bias] if row else [weight], row)
            new = call(graph, operator.getitem, results, 0, like=x)
            if bias is not None and not row:
                new = call(graph, aten.add.Tensor, new, bias)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    replaced[node] = new
