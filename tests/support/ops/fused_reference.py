"""What a fused program computes, by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nxd_infer.ops.fused import DTYPES, parsed, strides_of

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "cos": torch.cos,
    "sin": torch.sin,
    "copy": lambda x: x,
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "sum_of_squares": lambda x: x.square().sum(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
}


def fused_reference(inputs: Sequence[Tensor], program: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Compute the program with PyTorch's operators, in float32, and round as it says; in float64, for sharp
    comparisons, nothing is rounded."""
    told = parsed(program)
    values: list[Tensor] = []
    dtypes = [kept for _, kept in told.inputs]

    def add(value: Tensor, kept: str) -> None:
        rounded = value.to(DTYPES[kept]) if dtype == torch.float32 else value
        values.append(rounded.to(dtype))
        dtypes.append(kept)

    for x in inputs:
        whole = x.to(dtype).reshape([1] * (len(told.outer) + 1 - x.dim()) + list(x.shape))
        values.append(whole.expand(*told.outer, whole.shape[-1]))
    for name, *words in told.statements:
        if name == "constant":
            add(torch.full((*told.outer, 1), float(words[0]), dtype=dtype), "float32")
        elif name == "slice":
            value, begin, end = map(int, words)
            add(values[value][..., begin:end], dtypes[value])
        elif name == "concatenate":
            add(torch.cat([values[int(word)] for word in words[1:]], -1), dtypes[int(words[1])])
        elif name in REDUCTIONS:
            add(REDUCTIONS[name](values[int(words[0])]), "float32")
        else:
            function: Any = BINARY.get(name) or UNARY[name]
            add(function(*(values[int(word)] for word in words[1:])), words[0])
    found = []
    for value, order in told.outputs:
        kept = DTYPES[dtypes[value]] if dtype == torch.float32 else dtype
        strides = strides_of(told.outer, values[value].shape[-1], order)
        out = torch.empty(values[value].numel(), dtype=kept).as_strided(values[value].shape, strides)
        found.append(out.copy_(values[value]))
    return found
