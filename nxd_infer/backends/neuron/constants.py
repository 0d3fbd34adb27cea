"""What an HLO module computes out of constants alone: exactly, for the few operations that make places of a gather."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nxd_infer.backends.neuron.hlo import Instruction

Value = np.ndarray[Any, Any]
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
}
_PLAIN: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "select": np.where,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "convert": lambda x: x,
    "copy": lambda x: x,
}
MOST = 1 << 20
"""Elements of a value that is looked at; places are a row's or a step's."""


def constant(node: Instruction, known: dict[int, Value | None]) -> Value | None:
    """The whole numbers of ``node``, or None where they depend on a parameter. ``known`` remembers those of others."""
    if node.id not in known:
        known[node.id] = None if node.elements > MOST else _computed(node, known)
    return known[node.id]


def _computed(node: Instruction, known: dict[int, Value | None]) -> Value | None:
    if node.opcode == "constant":
        numbers = node.whole_numbers
        return None if numbers is None else np.array(numbers, dtype=np.int64).reshape(node.shape)
    if node.opcode == "iota":
        along = int(node.field("dimensions", ["0"])[0])
        steps = np.arange(node.shape[along], dtype=np.int64)
        return np.broadcast_to(steps.reshape([-1 if i == along else 1 for i in range(len(node.shape))]), node.shape)
    operands = [constant(operand, known) for operand in node.operands]
    if not operands or any(operand is None for operand in operands):
        return None
    return _applied(node, [operand for operand in operands if operand is not None])


def _applied(node: Instruction, operands: list[Value]) -> Value | None:
    if node.opcode in _PLAIN:
        return _PLAIN[node.opcode](*operands)
    if node.opcode == "compare":
        return _COMPARE[node.field("comparisonDirection", "EQ")](*operands)
    if node.opcode == "reshape":
        return operands[0].reshape(node.shape)
    if node.opcode == "broadcast":
        places: Mapping[int, int] = {int(to): at for at, to in enumerate(node.field("dimensions", []))}
        sizes = [operands[0].shape[places[i]] if i in places else 1 for i in range(len(node.shape))]
        return np.broadcast_to(operands[0].reshape(sizes), node.shape)
    if node.opcode == "concatenate":
        return np.concatenate(operands, axis=int(node.field("dimensions", ["0"])[0]))
    return None
