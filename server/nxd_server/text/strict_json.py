"""Parse untrusted JSON strictly."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from nxd_server.errors import BodyError

MOST_CONTAINERS = 2**18
"""Most brackets and braces, in texts too: lists and objects are slow to parse, which stops everything else. For four
million, the most that a body has room for, more than a second."""


def parse_json(data: bytes) -> dict[str, Any]:
    """``data`` as a JSON object.

    Raises BodyError if the text is empty, not UTF-8, not JSON (``NaN``, lone surrogates and more than 200 levels are
    not), not an object, or too complex.
    """
    if not data or data.isspace():
        raise _invalid("is empty; a JSON object is expected")
    if data.count(b"[") + data.count(b"{") > MOST_CONTAINERS:
        raise BodyError(
            f"the request body holds more than {MOST_CONTAINERS} lists and objects, which are not read; send less at "
            "once, or tensors as `safetensors`",
            "body_too_complex",
        )
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise _invalid(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise _invalid(f"must be a JSON object, not {kind}")
    return value


def _invalid(what: str) -> BodyError:
    return BodyError(f"the request body {what}", "invalid_json")
