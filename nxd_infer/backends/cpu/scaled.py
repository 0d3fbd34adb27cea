"""Linear layers whose weight is int8 with scales of its rows: ``x @ (q * scale).T`` becomes ``(x @ q.T) * scale``.

What remains is a linear of ``q``, which :mod:`nxd_infer.backends.cpu.packing` lets a packed operator read: one byte a
value, instead of the floating-point weight that the graph made of it in every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from nxd_infer.graph.passes import aten, call
from nxd_infer.ops.packed import DTYPES


def separate_scales(buckets: Sequence[Mapping[str, fx.Node]], minimum: int) -> None:
    """Change the weights of at least ``minimum`` bytes (0: none) of which every use in every bucket has this form.

    ``buckets``: for each the placeholders by weight name.
    """
    for name in dict.fromkeys(name for bucket in buckets for name in bucket):
        places = [bucket[name] for bucket in buckets if name in bucket]
        value = places[0].meta["val"]
        if value.dtype == torch.int8 and value.dim() == 2 and 0 < minimum <= value.numel():
            chains = [_chain(place) for place in places]
            for chain in chains if all(chains) else ():
                _separate(*chain)


def _chain(weight: fx.Node) -> list[fx.Node]:
    """Return the nodes from a weight to what is multiplied, ``(weight.to(float32) * scale).to(dtype)``; none if it has
    other uses."""
    chain = [weight]
    for target in (aten.to.dtype, aten.mul.Tensor, aten.to.dtype):
        users = list(chain[-1].users)
        if len(users) != 1 or users[0].target is not target or users[0].args[0] is not chain[-1]:
            return []
        chain += users
    scale, end = chain[2].args[1], chain[3]
    rows = isinstance(scale, fx.Node) and list(scale.meta["val"].shape) in ([1], [weight.meta["val"].shape[0], 1])
    linears = all(user.target is aten.linear.default and user.args[1] is end for user in end.users)
    return chain if rows and linears and end.meta["val"].dtype in DTYPES else []


def _separate(weight: fx.Node, first: fx.Node, product: fx.Node, end: fx.Node) -> None:
    graph = weight.graph
    for linear in list(end.users):
        (x, _, *bias), value = linear.args, linear.meta["val"]
        with graph.inserting_before(linear):
            y = graph.call_function(aten.linear.default, (x, weight))
            y.meta["val"] = value
            wide = call(graph, aten.to.dtype, y, torch.float32)
            wide = call(graph, aten.mul.Tensor, wide, call(graph, aten.view.default, product.args[1], [-1]))
            if bias and bias[0] is not None:
                wide = call(graph, aten.add.Tensor, wide, bias[0])
            linear.replace_all_uses_with(call(graph, aten.to.dtype, wide, value.dtype))
        graph.erase_node(linear)
    for node in (end, product, first):
        graph.erase_node(node)
