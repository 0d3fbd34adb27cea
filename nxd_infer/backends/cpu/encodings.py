"""The forms in which the CPU's graphs read weights; a rank packs each when it loads."""

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
"""Like the first, with 8-bit integers and one scale per row (``nxd_infer.ops.packed_int8``): rounded."""
ENCODINGS = frozenset({PACKED, PACKED_ACROSS, PACKED_INT8})


def _rounded(weight: Tensor) -> Tensor:
    from nxd_infer.ops.packed_int8 import quantize  # slow: torch

    q, scale = quantize(weight)
    return q * scale[:, None]


def _nbytes(shape: Sequence[int]) -> int:
    from nxd_infer.ops.packed_int8 import packed_shape  # slow: torch

    return math.prod(packed_shape(shape))


QUANTIZATIONS = {"int8": Quantization("int8", PACKED_INT8, _rounded, _nbytes)}
