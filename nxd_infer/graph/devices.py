"""Passes for backends whose graphs run on a device: rank as an input, constants on the device, plain operators only.

Each takes a graph in functional form and returns a new one; see also :mod:`nxd_infer.graph.split`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

import nxd_infer.comm.ops  # noqa: F401  (registers torch.ops.nxd)
from nxd_infer.errors import TraceError
from nxd_infer.graph.passes import aten, branches, call, copied, eliminate_dead_code, insert_operators, simplify
from nxd_infer.ops import COMPOSITE

nxd = torch.ops.nxd
_RANK = (nxd.axis_rank.default, nxd.shard.default)


def rank_as_input(module: fx.GraphModule) -> tuple[fx.GraphModule, list[str]]:
    """Return a graph that takes the rank on each of the returned axes as an int64 tensor of shape [1], before all other
    inputs. So all ranks have the same program, whatever a compiler does with constants.

    Raises TraceError if a branch of ``torch.cond`` reads the rank: branches can only use what the model passes in.
    """
    module = copied(module)
    graph = module.graph
    for branch in branches(module):
        if any(node.target in _RANK for node in branch.graph.nodes):
            raise TraceError(
                "a branch of torch.cond asks for its rank, which is an input on this backend: ask before the branch, "
                "and hand it in"
            )
    asking = [node for node in graph.nodes if node.target in _RANK]
    axes = list(dict.fromkeys(str(node.args[_RANK.index(node.target)]) for node in asking))
    ranks: dict[str, fx.Node] = {}
    first = next(iter(graph.nodes))
    for axis in axes:
        with graph.inserting_before(first):
            place = ranks[axis] = graph.placeholder(f"rank_{axis}")
        with _fake_mode(asking[0]):
            place.meta["val"] = torch.empty(1, dtype=torch.int64)
    for node in asking:
        with graph.inserting_before(node):
            if node.target is nxd.axis_rank.default:
                new = call(graph, aten.select.int, ranks[str(node.args[0])], 0, 0)
            else:
                new = _piece(graph, ranks, *node.args)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return module, axes


def _piece(graph: fx.Graph, ranks: dict[str, fx.Node], x: Any, axis: Any, dim: Any, degree: Any) -> fx.Node:
    """Return this rank's equal piece of ``x``: its rows are selected by indices computed from the rank."""
    value = x.meta["val"]
    size = value.shape[dim] // degree
    steps = call(graph, aten.arange.default, size, like=x, device=value.device, pin_memory=False)
    start = call(graph, aten.mul.Tensor, ranks[axis], size)
    return call(graph, aten.index_select.default, x, dim, call(graph, aten.add.Tensor, steps, start))


def _fake_mode(node: fx.Node) -> Any:
    return node.meta["val"].fake_mode


def constants_on(module: fx.GraphModule, device: str) -> fx.GraphModule:
    """Return a graph that creates its constants (ranges, zeros) on ``device``, a device type without an index: each
    replica's thread has its own device, and an index would name that of the first one."""
    target = torch.device(device)
    if target.index is not None:
        raise TraceError(f"constants go to a type of device, got {device!r}: leave its index out")
    module = copied(module)
    for graph in [module, *_nested(module)]:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                node.args = _moved(node.args, target)
                node.kwargs = _moved(node.kwargs, target)
    return module


def _moved(value: Any, target: torch.device) -> Any:
    if isinstance(value, torch.device):
        return target
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(entry, target) for entry in value)
    if isinstance(value, dict):
        return {key: _moved(entry, target) for key, entry in value.items()}
    return value


def _nested(module: fx.GraphModule) -> list[fx.GraphModule]:
    nested = branches(module)
    return [*nested, *(inner for branch in nested for inner in _nested(branch))]


def plain_operators(module: fx.GraphModule, keep: Iterable[Any] = ()) -> fx.GraphModule:
    """Return a graph of PyTorch's operators and collectives only: composite ones are replaced by their references,
    except those in ``keep``. Raises TraceError for a native or packed operator: such a graph was lowered for a CPU."""
    module = copied(module)
    kept = frozenset(keep)
    insert_operators(module, None, {target: body for target, body in COMPOSITE.items() if target not in kept})
    simplify(module)
    eliminate_dead_code(module)
    for graph in [module, *_nested(module)]:
        for node in graph.graph.nodes:
            namespace = getattr(node.target, "namespace", "")
            if namespace.startswith("nxd_"):
                raise TraceError(f"the graph calls {node.target}, a native operator, which this backend does not have")
    return module
