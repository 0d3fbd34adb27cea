"""The collectives of an HLO module, in the words of :func:`nxd_infer.graph.passes.collective_sequence`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from nxd_infer.errors import TraceError

_KINDS = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter"}
_OTHERS = ("all-to-all", "collective-permute", "collective-broadcast", "send", "recv")
_REDUCTIONS = {"add": "sum", "maximum": "max", "minimum": "min", "or": "max", "and": "min"}
"""By the operation of the reduction's own program; those of truth values have names of their own."""
_DTYPES = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "PRED": "bool"},
    **{f"S{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_BROADCAST = re.compile(r"broadcast\((\w+)\[(.*)\], (\w+), \d+, (\d+)\)")


def check_collectives(found: Sequence[str], recorded: Sequence[str]) -> None:
    """Raise TraceError unless the HLO has just the collectives that the graph records."""
    wanted = Counter(_BROADCAST.sub(_as_gather, call) for call in recorded)
    missing, more = wanted - Counter(found), Counter(found) - wanted
    if missing or more:
        raise TraceError(
            "the HLO has other collectives than the graph, so ranks would compute something else: it lacks "
            f"{_list(missing)} and has {_list(more)} besides"
        )


def _as_gather(match: re.Match[str]) -> str:
    dtype, shape, axis, degree = match.groups()
    return f"all_gather({dtype}[{', '.join(filter(None, ['1', shape]))}], {axis}, 0, {degree})"


def _list(calls: Counter[str]) -> str:
    return ", ".join(f"{count} x {call}" for call, count in sorted(calls.items())) or "none"


def collectives_of(module: str) -> list[str]:
    """The collectives of a module, given as protobuf's JSON of it. Raises TraceError for one that no graph records."""
    parsed = json.loads(module)
    computations = {entry["id"]: entry for entry in parsed["computations"]}
    return [
        _call(instruction, operands, computations)
        for computation in parsed["computations"]
        for instruction, operands in _instructions(computation)
        if instruction["opcode"] in (*_KINDS, *_OTHERS)
    ]


def _instructions(computation: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    by_id = {entry["id"]: entry for entry in computation["instructions"]}
    for entry in computation["instructions"]:
        yield entry, [by_id[operand] for operand in entry.get("operandIds", [])]


def _call(instruction: dict[str, Any], operands: list[dict[str, Any]], computations: dict[str, dict[str, Any]]) -> str:
    kind = _KINDS.get(instruction["opcode"])
    groups = [[int(rank) for rank in group["replicaIds"]] for group in instruction.get("replicaGroups", [])]
    if kind is None or len(groups) != 1 or groups[0] != list(range(len(groups[0]))):
        raise TraceError(
            f"the HLO holds {instruction['opcode']} among the ranks {groups}, which no operator of the graph stands for"
        )
    shape = operands[0]["shape"]
    sizes = [int(size) for size in shape.get("dimensions", [])]
    if kind == "all_reduce":
        called = computations[instruction["calledComputationIds"][0]]
        root = next(entry for entry in called["instructions"] if entry["id"] == called["rootId"])
        argument = _REDUCTIONS.get(root["opcode"], root["opcode"])
    else:
        argument = instruction.get("dimensions", ["0"])[0]
    dtype = _DTYPES.get(shape["elementType"], shape["elementType"])
    return f"{kind}({dtype}{sizes}, tp, {argument}, {len(groups[0])})"
