"""What pydantic says of a value that is not a number, in the words that checks of options use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KINDS = {"int": "a whole number", "float": "a number", "finite": "a number", "bool": "true or false"}


def wanted(error: Mapping[str, Any]) -> str:
    """``"must be a whole number"``, for one of a ValidationError's errors; "" for one that is not of a number."""
    kind = _KINDS.get(error["type"].partition("_")[0])
    if kind is None and "ge" in error.get("ctx", {}):
        kind = f"at least {error['ctx']['ge']:g}"
    return f"must be {kind}" if kind else ""
