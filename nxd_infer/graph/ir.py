"""The weightless intermediate representation: an operator graph as plain JSON, and the program that runs it.

A graph is a list of nodes in order; each names an operator (``aten.linear.default``) and its arguments. Placeholders
come first (states, inputs, weights), the flat outputs last. It holds no tensor, no code and no pickle. Values are named
by their numbers, so that equal graphs have equal text, whoever traced them.

There are two forms, distinguished by the number ``ir``: the functional one, which artifacts store (it returns the
states' new values after the outputs), and the one that changes its states in place, which the CPU's passes make of it.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

import nxd_infer.comm.ops
import nxd_infer.ops  # noqa: F401  (these two register the operators of the namespace "nxd")
from nxd_infer.errors import ArtifactCorruptError, TraceError
from nxd_infer.graph.passes import nested_graph

IN_PLACE = 1
"""``(states, inputs, weights) -> outputs``; the states are changed in place."""
FUNCTIONAL = 2
"""``(states, inputs, weights) -> (outputs, new states)``; the arguments are not changed."""
MOST_INPUTS = 2**20
"""Limit per graph; in practice states, inputs and weights together are some thousands."""
GETITEM = "getitem"
COND = "higher_order.cond"
_HIGHER_ORDER = {COND}
_ENUMS: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


# --- to JSON ------------------------------------------------------------------------------------------


def graph_to_ir(module: fx.GraphModule, form: int = IN_PLACE) -> dict[str, Any]:
    """Return the graph of ``module`` (only call_function nodes on tensors) as JSON. Raises TraceError by operator."""
    numbers: dict[fx.Node, int] = {}
    graphs: dict[fx.Node, dict[str, Any]] = {}
    nodes: list[list[Any]] = []
    inputs = 0
    outputs: list[Any] = []

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"graph": graphs[value]} if value in graphs else {"$": numbers[value]}
        return _encode_constant(value, encode)

    for node in module.graph.nodes:
        if node.op == "placeholder":
            numbers[node] = inputs
            inputs += 1
        elif node.op == "get_attr":
            target = nested_graph(module, node.target)
            if target is None:
                raise TraceError(f"the graph refers to the attribute {node.target!r}, which is not a nested graph")
            graphs[node] = graph_to_ir(target, form)
        elif node.op == "call_function":
            numbers[node] = inputs + len(nodes)
            entry = [_operator_name(node.target), [encode(a) for a in node.args]]
            if node.kwargs:
                entry.append({key: encode(value) for key, value in sorted(node.kwargs.items())})
            nodes.append(entry)
        elif node.op == "output":
            outputs = [encode(a) for a in _flat_outputs(node)]
        else:
            raise TraceError(f"a traced graph holds a {node.op} node ({node.target}); only operators can be stored")
    return {"ir": form, "inputs": inputs, "nodes": nodes, "outputs": outputs}


def _flat_outputs(node: fx.Node) -> Sequence[Any]:
    result = node.args[0]
    return result if isinstance(result, (tuple, list)) else (result,)


def _operator_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if target is operator.getitem:
        return GETITEM
    name = f"higher_order.{getattr(target, '__name__', target)}"
    if isinstance(target, torch._ops.HigherOrderOperator) and name in _HIGHER_ORDER:
        return name
    raise TraceError(
        f"the operation {target} cannot be stored in a traced graph: it depends on values or on Python objects "
        "(an .item(), a branch on a tensor, a custom class); express it with tensor operators"
    )


def _encode_constant(value: Any, encode: Callable[[Any], Any]) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise TraceError(f"a size in the graph depends on data ({value}); a traced graph has fixed shapes")
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, cls in _ENUMS.items():
        if isinstance(value, cls):
            return {kind: str(value).removeprefix("torch.")}
    if isinstance(value, slice):
        return {"slice": [encode(value.start), encode(value.stop), encode(value.step)]}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    raise TraceError(f"an argument of type {type(value).__name__} cannot be stored in a traced graph: {value!r}")


# --- from JSON ----------------------------------------------------------------------------------------


def resolve_operator(name: str) -> Any:
    """Return the operator called ``name``. Raises ArtifactCorruptError if this process has no such operator."""
    if name == GETITEM:
        return operator.getitem
    if name == COND:
        return run_cond
    parts = name.split(".")
    if len(parts) != 3 or not all(part.isidentifier() for part in parts):
        raise ArtifactCorruptError(f"{name!r} in a graph is not an operator's name")
    namespace, operation, overload = parts
    try:
        target = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    except (AttributeError, RuntimeError) as error:
        raise ArtifactCorruptError(
            f"the graph calls {name}, which is not registered in this process: its operator library is missing, or "
            "the graph was traced with another version of torch"
        ) from error
    if not isinstance(target, torch._ops.OpOverload):  # such as `aten.add.__class__`, which could reach other code
        raise ArtifactCorruptError(f"{name!r} in a graph is not an operator")
    return target


def _parts(ir: Any) -> tuple[int, list[tuple[str, list[Any], dict[str, Any]]], list[Any]]:
    """Return the number of inputs of a graph, its nodes as (name, arguments, named arguments), and its outputs. Raises
    ArtifactCorruptError if it is not a graph."""
    if not isinstance(ir, dict) or ir.get("ir") not in (IN_PLACE, FUNCTIONAL):
        found = ir.get("ir") if isinstance(ir, dict) else ir
        raise ArtifactCorruptError(
            f"a graph of format {str(found)[:40]!r}; this version reads {IN_PLACE} and {FUNCTIONAL}"
        )
    inputs, nodes, outputs = (ir.get(name) for name in ("inputs", "nodes", "outputs"))
    if (
        type(inputs) is not int
        or not 0 <= inputs <= MOST_INPUTS
        or type(nodes) is not list
        or type(outputs) is not list
    ):
        raise ArtifactCorruptError(f"a graph of {str(inputs)[:40]} inputs that has no lists of nodes and outputs")
    found = []
    for number, entry in enumerate(nodes):
        name, args, kwargs = [*entry, {}][:3] if type(entry) is list and 2 <= len(entry) <= 3 else ("", None, None)
        if type(name) is not str or type(args) is not list or type(kwargs) is not dict:
            raise ArtifactCorruptError(f"node {number} of a graph is not an operator with its arguments")
        if not all(key.isidentifier() and not keyword.iskeyword(key) for key in kwargs):  # they become program text
            raise ArtifactCorruptError(f"node {number} of a graph: {name} has no such arguments as {list(kwargs)}")
        found.append((name, args, kwargs))
    return inputs, found, outputs


def _value_number(value: Any, known: int) -> int:
    """Return the number that ``{"$": value}`` refers to; ``known`` values exist at that point."""
    if type(value) is not int or not 0 <= value < known:
        raise ArtifactCorruptError(f"a graph refers to value {str(value)[:40]}, and has {known} by then")
    return value


def damaged(error: Exception) -> ArtifactCorruptError:
    return ArtifactCorruptError(f"a graph is damaged: {type(error).__name__}: {str(error)[:200]}")


DAMAGES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""Errors of Python and torch for values that we never write; too deep nesting is a RuntimeError."""


def _decode_constant(value: Any, decode: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, data),) = value.items()
    if kind == "float":
        return float(data)
    if kind == "complex":
        return complex(*(decode(v) for v in data))
    if kind == "device":
        return torch.device(data)
    if kind == "slice":
        return slice(*(decode(v) for v in data))
    if kind in _ENUMS:
        constant = getattr(torch, data, None)
        if isinstance(constant, _ENUMS[kind]):
            return constant
    raise ArtifactCorruptError(f"a graph holds an argument this version cannot read: {value!r}")


class Value:
    """Index of a value in a program's table."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


class Program:
    """Runs a graph node by node, without generated code; a value is dropped after its last use.

    ``steps`` are (function, arguments, named arguments, values that die); a :class:`Value` stands for a value.
    """

    def __init__(self, ir: dict[str, Any]):
        """Raises ArtifactCorruptError if ``ir`` is not a graph."""
        try:
            self._build(ir)
        except ArtifactCorruptError:
            raise
        except DAMAGES as error:
            raise damaged(error) from error

    def _build(self, ir: dict[str, Any]) -> None:
        self.inputs, nodes, outputs = _parts(ir)
        known = self.inputs
        self.steps: list[tuple[Any, tuple, dict[str, Any], tuple[int, ...]]] = []
        last: dict[int, int] = {}
        used: set[int] = set()

        def decode(value: Any) -> Any:
            if isinstance(value, dict) and "$" in value:
                number = _value_number(value["$"], known)
                used.add(number)
                return Value(number)
            if isinstance(value, dict) and "graph" in value:
                return Program(value["graph"])
            return _decode_constant(value, decode)

        for number, (name, arguments, named) in enumerate(nodes):
            used.clear()
            args = tuple(decode(a) for a in arguments)
            kwargs = {key: decode(value) for key, value in named.items()}
            known += 1
            last.update(dict.fromkeys(used, number))
            last.setdefault(self.inputs + number, number)
            self.steps.append((resolve_operator(name), args, kwargs, ()))
        used.clear()
        self.outputs = [decode(o) for o in outputs]
        for index in used:
            last.pop(index, None)
        dead: dict[int, list[int]] = {}
        for index, number in last.items():
            dead.setdefault(number, []).append(index)
        self.steps = [(t, a, k, tuple(dead.get(n, ()))) for n, (t, a, k, _) in enumerate(self.steps)]

    def __call__(self, *values: Any) -> list[Any]:
        """Run on the placeholders' values in order; return the flat outputs."""
        table: list[Any] = list(values)
        for target, args, kwargs, dead in self.steps:
            table.append(target(*[_fill(a, table) for a in args], **{k: _fill(v, table) for k, v in kwargs.items()}))
            for index in dead:
                table[index] = None
        return [_fill(o, table) for o in self.outputs]


def _fill(value: Any, table: list[Any]) -> Any:
    if type(value) is Value:
        return table[value.index]
    if type(value) is list:
        return [_fill(v, table) for v in value]
    return value


def ir_to_graph(ir: dict[str, Any]) -> fx.GraphModule:
    """Rebuild an ``fx.GraphModule`` from the result of :func:`graph_to_ir`, for a compiler (placeholders ``v0``...)"""
    program = Program(ir)
    try:
        return _graph_of(program)
    except DAMAGES as error:
        raise damaged(error) from error


def _graph_of(program: Program) -> fx.GraphModule:
    root = torch.nn.Module()
    graph = fx.Graph()
    values = [graph.placeholder(f"v{i}") for i in range(program.inputs)]

    def node(value: Any) -> Any:
        if isinstance(value, Program):
            name = f"graph_{len(root._modules)}"
            root.add_module(name, _graph_of(value))
            return graph.get_attr(name)
        if isinstance(value, list):
            return [node(v) for v in value]
        return values[value.index] if isinstance(value, Value) else value

    for target, args, kwargs, _ in program.steps:
        function = torch.ops.higher_order.cond if target is run_cond else target
        named = {key: node(value) for key, value in kwargs.items()}
        values.append(graph.call_function(function, tuple(map(node, args)), named))
    graph.output(tuple(map(node, program.outputs)))
    return fx.GraphModule(root, graph)


def run_cond(condition: Any, if_true: Program, if_false: Program, operands: Sequence[Any] = ()) -> list[Any]:
    """Do what ``torch.cond`` does."""
    return (if_true if bool(condition) else if_false)(*operands)
