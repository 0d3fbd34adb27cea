"""An HLO module to look at, from protobuf's JSON of it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

_WHOLE = ("s8s", "s16s", "u16s", "s32s", "s64s", "u32s", "u64s", "preds")


class Instruction:
    """One instruction, with its operands."""

    def __init__(self, entry: dict[str, Any], computation: Computation):
        self._entry = entry
        self._computation = computation
        self.id = int(entry["id"])
        self.name: str = entry["name"]
        self.opcode: str = entry["opcode"]
        self.dtype: str = entry["shape"]["elementType"]
        """In XLA's words: ``F32``, ``S64``, ``PRED``, ``TUPLE``."""
        self.shape = [int(size) for size in entry["shape"].get("dimensions", [])]
        self.users: list[Instruction] = []

    def field(self, name: str, default: Any) -> Any:
        return self._entry.get(name, default)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def operands(self) -> list[Instruction]:
        return [self._computation.by_id[int(number)] for number in self.field("operandIds", [])]

    @property
    def called(self) -> list[Computation]:
        """The computations that it applies."""
        return [self._computation.module.by_id[int(number)] for number in self.field("calledComputationIds", [])]

    @property
    def parameter(self) -> int:
        """Which parameter it is; only of a parameter."""
        return int(self.field("parameterNumber", 0))

    @property
    def whole_numbers(self) -> list[int] | None:
        """The values of a constant of whole numbers or truth values; None for another one."""
        literal = self.field("literal", {})
        found = next((literal[name] for name in _WHOLE if name in literal), None)
        if isinstance(found, str):  # bytes, as protobuf writes them
            return None
        return None if found is None else [int(number) for number in found]


class Computation:
    """Its parameters, and the instructions that its result is made of: torch_xla leaves others that do nothing."""

    def __init__(self, entry: dict[str, Any], module: Module):
        self.module = module
        self._root = int(entry["rootId"])
        every = [Instruction(each, self) for each in entry["instructions"]]
        self.by_id = {each.id: each for each in every}
        used = before(self.root)
        self.instructions = [each for each in every if each.id in used or each.opcode == "parameter"]
        for each in self.instructions:
            for operand in each.operands:
                operand.users.append(each)

    @property
    def root(self) -> Instruction:
        return self.by_id[self._root]

    def parameters(self) -> dict[int, Instruction]:
        return {each.parameter: each for each in self.instructions if each.opcode == "parameter"}


def before(node: Instruction) -> set[int]:
    """The ids of ``node`` and of all that it is made of."""
    found: set[int] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each.id not in found:
            found.add(each.id)
            pending += each.operands
    return found


class Module:
    """The whole module. ``text``: protobuf's JSON."""

    def __init__(self, text: str):
        parsed = json.loads(text)
        self._entry = int(parsed["entryComputationId"])
        self.by_id: dict[int, Computation] = {}
        for entry in parsed["computations"]:
            self.by_id[int(entry["id"])] = Computation(entry, self)

    @property
    def entry(self) -> Computation:
        return self.by_id[self._entry]

    @functools.cached_property
    def results(self) -> list[Instruction]:
        """What the module returns, in order."""
        root = self.entry.root
        return root.operands if root.opcode == "tuple" else [root]

    def __iter__(self) -> Iterator[Instruction]:
        for computation in self.by_id.values():
            yield from computation.instructions
