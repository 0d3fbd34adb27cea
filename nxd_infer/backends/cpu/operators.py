"""The native operators, if there can be any."""

from __future__ import annotations

from typing import Any

from nxd_infer import native
from nxd_infer.errors import BackendUnavailableError


def native_library() -> Any | None:
    """Return the native operators, or None if they cannot be built (no compiler, no headers)."""
    if not native.availability().ok:
        return None
    try:
        return native.load()
    except BackendUnavailableError:
        return None


def why_unsupported() -> str:
    """Return why this release of torch can have no native operators; "" if it can."""
    return "" if native.has_stable_abi() else native.availability().reason
