"""Many element-wise functions and reductions as one operator, in one pass over memory.

A fused operator computes a program over rows: its results have the same dimensions but the last, the *outer* ones, and
every value of the program is a row for each index of those. The program is a text, in which a value is known by its
number: first the inputs, then what each statement makes.

    2 8 16 bfloat16 64 same float32 64 ; mul float32 0 1 ; silu bfloat16 2 ; -> 3 1 0

reads: 2 outer dimensions, of 8 and 16; two inputs, with dtype and width, of which the second is the same for all rows;
statements, each ended by ``;``; then each result, with the outer dimensions in the order of memory, last one first.

Statements are ``constant NUMBER``, ``slice VALUE BEGIN END``, ``concatenate COUNT VALUES...``, the functions of
:data:`BINARY` and :data:`UNARY` with the dtype to which they round, and the reductions of :data:`REDUCTIONS`, whose
width is 1 and dtype float32. A function computes in float32. A float32 value of width 1 goes with one of any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINARY = ("add", "sub", "mul", "div")
UNARY = (
    "neg", "abs", "square", "sqrt", "rsqrt", "reciprocal", "exp", "sigmoid", "silu", "tanh", "gelu", "gelu_tanh",
    "relu", "cos", "sin", "copy",
)  # fmt: skip
REDUCTIONS = ("sum", "sum_of_squares", "amax")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Parsed:
    """The parts of a program's text."""

    outer: list[int]
    inputs: list[tuple[int, str]]
    """Width and dtype."""
    statements: list[list[str]]
    outputs: list[tuple[int, list[int]]]
    """Value, and outer dimensions in the order of memory."""


def parsed(program: str) -> Parsed:
    """Split a text that is a program."""
    before, _, after = program.partition("->")
    head, *statements = [part.split() for part in before.split(";")][:-1]
    dims = int(head[0])
    described = [word for word in head[1 + dims :] if word != "same"]
    words = list(map(int, after.split()))
    return Parsed(
        outer=[int(size) for size in head[1 : 1 + dims]],
        inputs=[(int(width), dtype) for dtype, width in zip(described[::2], described[1::2], strict=True)],
        statements=statements,
        outputs=[(words[at], words[at + 1 : at + 1 + dims]) for at in range(0, len(words), 1 + dims)],
    )


def fused_fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    """Return empty results."""
    told = parsed(program)
    values = list(told.inputs)
    for name, *words in told.statements:
        if name == "slice":
            values.append((int(words[2]) - int(words[1]), values[int(words[0])][1]))
        elif name == "concatenate":
            parts = [values[int(word)] for word in words[1:]]
            values.append((sum(width for width, _ in parts), parts[0][1]))
        elif name in BINARY or name in UNARY:
            values.append((max(values[int(word)][0] for word in words[1:]), words[0]))
        else:
            values.append((1, "float32"))
    found = []
    for value, order in told.outputs:
        width, kept = values[value]
        strides = strides_of(told.outer, width, order)
        found.append(inputs[0].new_empty_strided((*told.outer, width), strides, dtype=DTYPES[kept]))
    return found


def strides_of(outer: Sequence[int], width: int, order: Sequence[int]) -> list[int]:
    strides = [0] * len(outer)
    stride = width
    for dim in order:
        strides[dim] = stride
        stride *= outer[dim]
    return [*strides, 1]
