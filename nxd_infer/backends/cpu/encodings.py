"""The forms in which the CPU's graphs read weights, and the options that ask for them; a rank packs each weight when it
loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from nxd_infer.backends.base import Quantization

if TYPE_CHECKING:
    from torch import Tensor

PACKED = "packed32"
"""In blocks of 32 rows (``nxd_infer.ops.packed``)."""
PACKED_ACROSS = "packed32-across"
"""The same of the transpose: of a weight [K, N] as GPT-2's layers have it, ``x @ W + b``."""
PACKED_INT8 = "packed32-int8"
"""Like the first, with 8-bit integers and one scale per row: rounded."""
PACKED_STORED = "packed32-stored-int8"
"""Of a weight that is stored as int8, unchanged: with scales of 1, because the graph multiplies by its own."""
INT4 = {
    f"int4{size}{zeros}": (group, bool(zeros))
    for zeros in ("", "-asym")
    for group, size in ((32, ""), (64, "-64"), (128, "-128"))
}
"""The forms in four bits (``nxd_infer.ops.int4``): by name, the largest group and whether it has zeros."""
_INT4 = "packed32-"
ENCODINGS = frozenset({PACKED, PACKED_ACROSS, PACKED_INT8, PACKED_STORED, *(_INT4 + name for name in INT4)})


def int4_form(encoding: str) -> tuple[int, bool] | None:
    """Return the group and whether there are zeros; None for an encoding that is not of four bits."""
    return INT4.get(encoding.removeprefix(_INT4))


def form_beside(encoding: str) -> str:
    """Return the form of tables, heads and experts where linear layers have ``encoding``. Of four bits these have
    eight: logits are close to each other, a table's rows are added up nowhere, and experts are read a few per token."""
    return encoding if int4_form(encoding) is None else PACKED_INT8


def held_shape(shape: Sequence[int], encoding: str) -> list[int]:
    """Return the shape of a rounded weight [..., K] as graphs take it."""
    from nxd_infer.ops import int4, packed  # slow: torch

    form = int4_form(encoding)
    return packed.packed_shape(shape) if form is None else int4.packed_shape(shape, *form)


def _rounded(weight: Tensor) -> Tensor:
    from nxd_infer.ops.packed import quantize  # slow: torch

    q, scale = quantize(weight)
    return q * scale[..., None]


def _rounded_int4(weight: Tensor, group: int, zeros: bool) -> Tensor:
    from nxd_infer import native  # slow: torch
    from nxd_infer.ops import int4

    packed = int4.pack(weight, group, zeros, library=native.load_if_possible())
    return int4.dequantize(*int4.unpack(packed))[:, : weight.shape[1]]


def _input_int4(x: Tensor) -> Tensor:
    from nxd_infer.ops import int4  # slow: torch

    return int4.rounded_input(x)


def _nbytes(shape: Sequence[int], encoding: str) -> int:
    """As :func:`held_shape` has it, which needs torch: a server plans its memory without."""
    *rows, K = shape
    group, zeros = int4_form(encoding) or (0, False)
    sizes = range(32, group + 1, 32)
    return math.prod(rows) * min((-(-K // size) * (size // 2 + 2 + zeros) for size in sizes), default=K + 4)


_NOTE = "; tables, heads and experts in int8. The layers' inputs are rounded to eight bits"
QUANTIZATIONS = {
    "int8": Quantization("int8", PACKED_INT8, _rounded, partial(_nbytes, encoding=PACKED_INT8)),
    **{
        name: Quantization(
            name,
            encoding := _INT4 + name,
            partial(_rounded_int4, group=group, zeros=zeros),
            partial(_nbytes, encoding=encoding),
            _input_int4,
            _NOTE,
        )
        for name, (group, zeros) in INT4.items()
    },
}
ROUNDED = frozenset(form.encoding for form in QUANTIZATIONS.values())


PACKED_OPTION = "nxd_packed"
"""The compiler option: True (weights of at least MINIMUM_BYTES), False, or the least size in bytes."""
MINIMUM_BYTES = 64 << 10
"""Smaller weights stay in the caches and gain nothing."""

QUANTIZE = "quantize"
"""Key of a trace's configuration for the name of a quantization; absent if weights keep their type."""
