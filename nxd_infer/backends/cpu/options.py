"""Options of the CPU backends about the form of weights: which are packed, and in how many bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nxd_infer.errors import TraceConfigError

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
