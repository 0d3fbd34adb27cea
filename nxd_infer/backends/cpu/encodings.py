"""The forms in which the CPU's graphs read weights, and the options that ask for them; a rank packs each weight when it
loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
ENCODINGS = frozenset({PACKED, PACKED_ACROSS, PACKED_INT8, PACKED_STORED})


def _rounded(weight: Tensor) -> Tensor:
    from nxd_infer.ops.packed import quantize  # slow: torch

    q, scale = quantize(weight)
    return q * scale[..., None]


def _nbytes(shape: Sequence[int]) -> int:
    """As ``nxd_infer.ops.packed.packed_shape`` has it, which needs torch: a server plans its memory without."""
    return math.prod(shape[:-1]) * (shape[-1] + 4)


QUANTIZATIONS = {"int8": Quantization("int8", PACKED_INT8, _rounded, _nbytes)}


PACKED_OPTION = "nxd_packed"
"""The compiler option: True (weights of at least MINIMUM_BYTES), False, or the least size in bytes."""
MINIMUM_BYTES = 64 << 10
"""Smaller weights stay in the caches and gain nothing."""

QUANTIZE = "quantize"
"""Key of a trace's configuration for the name of a quantization; absent if weights keep their type."""
