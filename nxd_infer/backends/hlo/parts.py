"""The passes: a canonical graph in three parts, of which the body is the same program on every rank.

The host runs the head (ids of tokens that a slot remembers) and the tail (penalties, the sampler, its memory); the body
is for the device. The body takes its rank as data and holds PyTorch's operators and collectives only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from nxd_infer.backends.hlo.files import BODY_FILE, HEAD_FILE, PARTS_FILE, TAIL_FILE, PartFile, PartsFile, Value
from nxd_infer.errors import TraceError
from nxd_infer.graph.canonical import Graph
from nxd_infer.graph.devices import constants_on, plain_operators, rank_as_input
from nxd_infer.graph.ir import FUNCTIONAL, graph_to_ir
from nxd_infer.graph.passes import aten, branches, collective_sequence, output_of, placeholders
from nxd_infer.graph.split import Part, split_at
from nxd_infer.graph.stored import Lowered, ir_text
from nxd_infer.ops import HOST
from nxd_infer.util.dtypes import dtype_name

DEVICE = "xla"
_RIGHT_SHIFTS = (aten.bitwise_right_shift, aten.bitwise_right_shift_, aten.__rshift__, aten.__irshift__)
TOKEN = "token"  # nosec B105  # the type of a value in HLO


def lower_graphs(graphs: Sequence[Graph]) -> list[Lowered]:
    """Cut every graph. Raises TraceError for what cannot be on a device, or would have to be in both places."""
    return [_lower(graph) for graph in graphs]


def _lower(graph: Graph) -> Lowered:
    states, inputs = len(graph.file.states), len(graph.file.inputs)
    split = split_at(plain_operators(graph.module, keep=HOST), states, inputs, HOST)
    weights = dict(zip(split.given[states + inputs :], (spec.name for spec in graph.file.weights), strict=True))
    for part in (split.head, split.tail):
        _check_host(part, weights)
    _write_where_they_are(split.tail, {split.given[place] for place in split.host_states})
    _check_device(split.body.module)
    body, ranks = rank_as_input(constants_on(split.body.module, DEVICE))
    names = [*(rank_name(axis) for axis in ranks), *split.body.takes]
    places = [place.meta["val"] for place in placeholders(body.graph)]
    given = [node.meta["val"] for node in output_of(body.graph).args[0]]
    outputs = len(split.results) - states
    table = PartsFile(
        given=split.given,
        outputs=split.results[:outputs],
        new_states=split.results[outputs:],
        head=_names(split.head),
        body=_names(split.body),
        tail=_names(split.tail),
        ranks=ranks,
        specs=[value(name, tensor) for name, tensor in zip(names, places, strict=True)],
        results=[value(name, tensor) for name, tensor in zip(split.body.gives, given, strict=True)],
    )
    files = {
        PARTS_FILE: table.model_dump_json(indent=1) + "\n",
        HEAD_FILE: _text(split.head.module),
        BODY_FILE: _text(body),
        TAIL_FILE: _text(split.tail.module),
    }
    return Lowered(graph.file.model_copy(deep=True), files)


def rank_name(axis: str) -> str:
    return f"rank:{axis}"


def value(name: str, tensor: Any) -> Value:
    return Value(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape))


def _check_device(body: fx.GraphModule) -> None:
    if branches(body):
        raise TraceError(
            "the graph holds a branch that depends on a value (torch.cond), which a device's program cannot take: "
            "compute both sides and choose with torch.where"
        )
    for node in body.graph.nodes:
        signed = isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dtype.is_signed
        if signed and getattr(node.target, "overloadpacket", None) in _RIGHT_SHIFTS:
            raise TraceError(
                f"{node.target} of signed numbers: XLA rounds negative ones toward zero, torch down (-5 >> 1 is -2 and "
                "-3); divide with rounding_mode='floor' instead"
            )
        if node.target is aten.view.dtype:
            raise TraceError(f"{node.target}: XLA does not read a tensor's bits as another type; convert the values")


def _check_host(part: Part, weights: Mapping[str, str]) -> None:
    """The host has no weights, and nobody to exchange values with."""
    read = [weights[name] for name in part.takes if name in weights]
    if read:
        raise TraceError(
            f"the weight {read[0]!r} is read by what follows a sampling operator, which runs on the host, where there "
            "are no weights: use it before"
        )
    if collective_sequence(part.module):
        raise TraceError(
            "a collective follows a sampling operator, which runs on the host: exchange the values before it"
        )


def _write_where_they_are(tail: Part, states: set[str]) -> None:
    """The tail changes the host's states in place: it runs last, and a copy of them would be made at every step."""
    for name, place in zip(tail.takes, placeholders(tail.module.graph), strict=True):
        (user, *others) = place.users
        if name in states and not others and user.target is aten.clone.default:
            user.replace_all_uses_with(place)
            tail.module.graph.erase_node(user)


def _names(part: Part) -> PartFile:
    return PartFile(takes=part.takes, gives=part.gives)


def _text(module: fx.GraphModule) -> str:
    return ir_text(graph_to_ir(module, FUNCTIONAL))
