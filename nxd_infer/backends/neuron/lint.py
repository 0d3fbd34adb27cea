"""What the Neuron compiler and the cores of Inf2 and Trn1 cannot do, as far as their documents say and a graph shows.

Each rule carries the code that neuronx-cc gives it. They were read in the documents of Neuron SDK 2.32 (August 2026);
no compiler was at hand to try one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nxd_infer.backends.hlo.module import Instruction, Module, before
from nxd_infer.errors import TraceError

WHOLE = {*(f"S{bits}" for bits in (4, 8, 16, 32, 64)), *(f"U{bits}" for bits in (4, 8, 16, 32, 64)), "PRED"}
TYPES = {"PRED", "F16", "BF16", "F32", "F8E4M3FN", "F8E5M2", "U8", "S32", "U32", "S64", "TUPLE", "TOKEN"}
"""Those of NeuronCore-v2. It computes S64 in 32 bits."""
_PLACES = {
    "gather": ("gatherDimensionNumbers", "startIndexMap"),
    "scatter": ("scatterDimensionNumbers", "scatterDimsToOperandDims"),
}
"""Where an instruction says which dimension each number of its places, the second operand, is for."""


@dataclass(frozen=True)
class Finding:
    """A limit that a module breaks."""

    rule: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.rule} at {self.where}: {self.what}"


def check(module: Module, aliases: Mapping[int, int]) -> None:
    """Raise TraceError with every limit that ``module`` breaks. ``aliases``: see :func:`findings`."""
    if found := findings(module, aliases):
        lines = "".join(f"\n  {each}" for each in found[:8])
        more = f"\n  and {len(found) - 8} more" if len(found) > 8 else ""
        raise TraceError(f"the graph cannot run on a NeuronCore of Inf2 or Trn1:{lines}{more}")


def findings(module: Module, aliases: Mapping[int, int]) -> list[Finding]:
    """The limits that ``module`` breaks. ``aliases``: which parameter's memory takes each such result, by number."""
    found = [Finding(rule, node.name, what) for rule, look in RULES.items() for node in module for what in look(node)]
    return found + [Finding(ALIAS, node.name, what) for node, what in _reads_after_writes(module, aliases)]


# --- what of an instruction breaks a rule ---------------------------------------------------------------


def _type(node: Instruction) -> Iterator[str]:
    # A number of float64 is what torch_xla writes for any model: it is converted at once, and not computed with.
    number = node.opcode == "constant" and not node.shape and all(user.opcode == "convert" for user in node.users)
    if node.dtype not in TYPES and not number:
        yield f"NeuronCore-v2 has no {node.dtype}: use a type of 32 bits or fewer, such as float32 or int32"


def _topk(node: Instruction) -> Iterator[str]:
    keys: list[Instruction] = []
    if node.opcode == "topk" or (node.opcode == "custom-call" and "TopK" in node.field("customCallTarget", "")):
        keys = node.operands[:1]
    elif node.opcode == "sort":  # by the operands that its comparison looks at
        compared = {number // 2 for number, place in node.called[0].parameters().items() if place.users}
        keys = [node.operands[number] for number in sorted(compared)]
    if any(key.dtype in WHOLE for key in keys):
        yield f"top-k, or a sort, of {keys[0].dtype}: convert to float32 first"


def _shift(node: Instruction) -> Iterator[str]:
    if node.opcode == "shift-right-arithmetic" and node.dtype not in ("S32", "U32"):
        yield f"an arithmetic right shift of {node.dtype}: only 32 bits can be shifted, so use int32"


def _scatter_add(node: Instruction) -> Iterator[str]:
    adds = node.opcode == "scatter" and any(each.opcode == "add" for each in node.called[0].instructions)
    if adds and node.dtype in WHOLE:
        yield f"a scatter that adds {node.dtype}: add in float32, or write without adding"


def _reduction(node: Instruction) -> Iterator[str]:
    for operand in node.operands if node.opcode in ("all-reduce", "reduce-scatter") else ():
        if operand.dtype in WHOLE:
            yield f"{node.opcode} of {operand.dtype}: ranks can add and compare floating-point types only"


def _product(node: Instruction) -> Iterator[str]:
    if node.opcode == "dot" and node.dtype in WHOLE:
        yield f"a matrix product of {node.dtype}: convert to float32 or bfloat16 first"


def _large_constant(node: Instruction) -> Iterator[str]:
    numbers = node.whole_numbers if node.opcode == "constant" and node.dtype in ("S64", "U64") else None
    if outside := [number for number in numbers or () if not -(2**31) <= number < 2**31]:
        yield f"the constant {outside[0]} needs 64 bits, and whole numbers have 32"


def _out_of_bounds(node: Instruction) -> Iterator[str]:
    if node.opcode not in _PLACES:
        return
    target, chosen, *_ = node.operands
    places = _constant(chosen, {})
    if places is None or not places.size:
        return
    name, mapped = _PLACES[node.opcode]
    numbers = node.field(name, {})
    vector = int(numbers.get("indexVectorDim", 0))
    if vector == places.ndim:
        places = places[..., None]
    for number, dimension in enumerate(int(each) for each in numbers.get(mapped, [])):
        taken = int(node.field("gatherSliceSizes", [1] * len(target.shape))[dimension])
        limit = target.shape[dimension] - taken
        own = np.take(places, number, axis=vector)
        if own.min() < 0 or own.max() > limit:
            yield (
                f"it goes to {own.min()} to {own.max()} of dimension {dimension}, which ends at {limit}: outside of a "
                "tensor nothing is read as zero or left out, as on other devices"
            )


def _reads_after_writes(module: Module, aliases: Mapping[int, int]) -> Iterator[tuple[Instruction, str]]:
    """The new state takes the old one's memory, so whoever reads the old one must be part of making the new one."""
    parameters = module.entry.parameters()
    for result, number in aliases.items():
        needed = before(module.results[result])
        for reader in parameters[number].users if number in parameters else ():
            if reader.id not in needed:
                what = f"parameter {number} is read for something else than its new value, which takes its memory: "
                yield reader, what + "read the state after it was written, not before"


ALIAS = "read after write on aliased input/output buffer"
RULES: Mapping[str, Callable[[Instruction], Iterator[str]]] = {
    "types of NeuronCore-v2": _type,
    "NCC_EVRF013": _topk,
    "NCC_EVRF022": _shift,
    "NCC_EVRF016, NCC_EVRF060": _scatter_add,
    "NCC_EVRF061, NCC_EVRF063": _reduction,
    "NCC_EVRF035": _product,
    "NCC_ESFH002": _large_constant,
    "NCC_EVRF031, NCC_EVRF056": _out_of_bounds,
}


# --- what a module computes out of constants alone: exactly, for the operators that make a gather's places -----

_Value = np.ndarray[Any, Any]
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
_MOST = 1 << 20
"""Elements of a value that is looked at; places are a row's or a step's."""


def _constant(node: Instruction, known: dict[int, _Value | None]) -> _Value | None:
    """The whole numbers of ``node``, or None where they depend on a parameter. ``known`` remembers those of others."""
    if node.id not in known:
        known[node.id] = None if node.elements > _MOST else _computed(node, known)
    return known[node.id]


def _computed(node: Instruction, known: dict[int, _Value | None]) -> _Value | None:
    if node.opcode == "constant":
        numbers = node.whole_numbers
        return None if numbers is None else np.array(numbers, dtype=np.int64).reshape(node.shape)
    if node.opcode == "iota":
        along = int(node.field("dimensions", ["0"])[0])
        steps = np.arange(node.shape[along], dtype=np.int64)
        return np.broadcast_to(steps.reshape([-1 if i == along else 1 for i in range(len(node.shape))]), node.shape)
    operands = [_constant(operand, known) for operand in node.operands]
    if not operands or any(operand is None for operand in operands):
        return None
    return _applied(node, [operand for operand in operands if operand is not None])


def _applied(node: Instruction, operands: list[_Value]) -> _Value | None:
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
