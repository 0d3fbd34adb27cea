"""The collectives of an HLO module, in the words of :func:`nxd_infer.graph.passes.collective_sequence`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from nxd_infer.backends.hlo.module import Instruction, Module
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


def check_collectives(lowered: Sequence[str], recorded: Sequence[str]) -> None:
    """Raise TraceError unless the HLO has just the collectives that the graph records."""
    expected = Counter(_BROADCAST.sub(_as_gather, call) for call in recorded)
    missing, more = expected - Counter(lowered), Counter(lowered) - expected
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


def collectives_of(module: Module) -> list[str]:
    """The collectives of a module. Raises TraceError for one that no graph records."""
    return [
        _call(node)
        for computation in module.by_id.values()
        for node in computation.by_id.values()
        if node.opcode in (*_KINDS, *_OTHERS)
    ]


def _call(node: Instruction) -> str:
    kind = _KINDS.get(node.opcode)
    groups = [[int(rank) for rank in group["replicaIds"]] for group in node.field("replicaGroups", [])]
    if kind is None or len(groups) != 1 or groups[0] != list(range(len(groups[0]))):
        raise TraceError(
            f"the HLO holds {node.opcode} among the ranks {groups}, which no operator of the graph stands for"
        )
    if kind == "all_reduce":
        reduction = node.called[0].root.opcode
        argument = _REDUCTIONS.get(reduction, reduction)
    else:
        argument = node.field("dimensions", ["0"])[0]
    operand = node.operands[0]
    return f"{kind}({_DTYPES.get(operand.dtype, operand.dtype)}{operand.shape}, tp, {argument}, {len(groups[0])})"
