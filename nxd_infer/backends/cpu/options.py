"""Options of the CPU backends about the form of weights: which are packed, and in how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_infer.artifact.manifest import PACKED_INT8
from nxd_infer.errors import TraceConfigError

OPTION = "nxd_packed"
"""The compiler option: True (weights of at least MINIMUM_BYTES), False, or the least size in bytes."""
MINIMUM_BYTES = 64 << 10
"""Smaller weights stay in the caches and gain nothing."""

QUANTIZE = "quantize"
"""Key of a trace's configuration for one of QUANTIZATIONS; absent if weights keep their type."""
QUANTIZATIONS = {"int8": PACKED_INT8}
"""Values of ``quantize``, and the encoding of weights that would otherwise be packed."""


def packed_option(value: Any) -> int:
    """Return the least size in bytes of a packed weight; 0 for none. Raises TraceConfigError for another value."""
    if isinstance(value, bool):
        return MINIMUM_BYTES if value else 0
    if isinstance(value, int) and value > 0:
        return value
    raise TraceConfigError(
        f"compiler_args: {OPTION}={value!r} must be True, False, or the number of bytes from which on a weight is "
        f"packed (True means {MINIMUM_BYTES})"
    )


def quantize_option(value: Any, options: Mapping[str, Any]) -> dict[str, str]:
    """Return what ``quantize=value`` adds to a trace's configuration. Raises TraceConfigError for an unknown value."""
    if value is None:
        return {}
    if not isinstance(value, str) or value not in QUANTIZATIONS:
        raise TraceConfigError(f"quantize={value!r} is not one of {', '.join(map(repr, QUANTIZATIONS))}, or None")
    if not options.get(OPTION):
        raise TraceConfigError(
            f"quantize={value!r} is a form of packed weights and compiler_args turn those off ({OPTION}=False): "
            "leave one of the two out"
        )
    return {QUANTIZE: value}
