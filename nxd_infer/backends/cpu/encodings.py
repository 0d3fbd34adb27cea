"""The forms in which the CPU's graphs read weights, and the options that ask for them; a rank packs each weight when it
loads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nxd_infer.backends.base import Quantization
from nxd_infer.errors import TraceConfigError

if TYPE_CHECKING:
    from torch import Tensor

PACKED = "packed32"
"""In blocks of 32 rows (``nxd_infer.ops.packed``)."""
PACKED_ACROSS = "packed32-across"
"""The same of the transpose: of a weight [K, N] as GPT-2's layers have it, ``x @ W + b``."""
PACKED_INT8 = "packed32-int8"
"""Like the first, with 8-bit integers and one scale per row: rounded."""
ENCODINGS = frozenset({PACKED, PACKED_ACROSS, PACKED_INT8})


def _rounded(weight: Tensor) -> Tensor:
    from nxd_infer.ops.packed import quantize  # slow: torch

    q, scale = quantize(weight)
    return q * scale[:, None]


def _nbytes(shape: Sequence[int]) -> int:
    from nxd_infer.ops.packed import packed_shape  # slow: torch

    return math.prod(packed_shape(shape))


QUANTIZATIONS = {"int8": Quantization("int8", PACKED_INT8, _rounded, _nbytes)}


PACKED_OPTION = "nxd_packed"
"""The compiler option: True (weights of at least MINIMUM_BYTES), False, or the least size in bytes."""
MINIMUM_BYTES = 64 << 10
"""Smaller weights stay in the caches and gain nothing."""

QUANTIZE = "quantize"
"""Key of a trace's configuration for the name of a quantization; absent if weights keep their type."""


def packed_option(value: Any) -> int:
    """Return the least size in bytes of a packed weight; 0 for none. Raises TraceConfigError for another value."""
    if isinstance(value, bool):
        return MINIMUM_BYTES if value else 0
    if isinstance(value, int) and value > 0:
        return value
    raise TraceConfigError(
        f"compiler_args: {PACKED_OPTION}={value!r} must be True, False, or the number of bytes from which on a weight "
        f"is packed (True means {MINIMUM_BYTES})"
    )


def quantize_option(value: str | None, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what ``quantize=value`` adds to a trace's configuration. Raises TraceConfigError if weights are not to be
    packed."""
    if value is None:
        return {}
    if not options.get(PACKED_OPTION):
        raise TraceConfigError(
            f"quantize={value!r} is a form of packed weights and compiler_args turn those off ({PACKED_OPTION}=False): "
            "leave one of the two out"
        )
    return {QUANTIZE: value}
