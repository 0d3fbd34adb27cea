"""Parse untrusted JSON strictly, after counting its elements.

The parser holds the GIL while it runs: 0.1 s for a text of 16 MiB, seconds for millions of small lists. So the
elements of a body are counted first, with string searches that take almost no time, and a body that would take too
long is never parsed. Large bodies are parsed in a separate process
(:class:`~nxd_server.text.text_process_jobs.BoundedJson`).
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from nxd_server.errors import BodyError
from nxd_server.text.field_bounds import ANY, MOST_ELEMENTS, Bounds

MOST_CONTAINERS = 2**14
"""Most lists and objects; each costs as much as ten numbers, and more in the code that later visits each."""
MOST_KEYS = 2**15
NUMBER_BYTES = 64
"""Most bytes per element outside strings, on average: a number with thousands of digits takes long to parse."""
SLACK_BYTES = 2**14
WINDOW = 2**16


class Outline:
    """Element counts of a JSON text, from its punctuation outside strings. Meaningless if the text is not JSON."""

    def __init__(self, data: bytes, most: int = MOST_ELEMENTS):
        """Raises BodyError as soon as a limit is exceeded: ``most`` values, or one of the others."""
        self._most = most
        self.elements = 0
        self.containers = 0
        self.objects = 0
        self.keys = 0
        self.bytes = 0
        place, inside = 0, False
        while place < len(data):
            window = data[place : place + WINDOW]
            if place + WINDOW < len(data) and (len(window) - len(window.rstrip(b"\\"))) % 2:
                window = window[:-1]  # the backslash escapes the next window's first byte
            place += len(window)
            inside = self._count(window, inside)
            self._check()

    def _count(self, window: bytes, inside: bool) -> bool:
        """Count a window that begins inside a string, or not; return whether the next one does."""
        if b"\\" in window:
            window = window.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote begins or ends a string
        parts = window.split(b'"')
        outside = b"".join(parts[int(inside) :: 2])
        objects = outside.count(b"{")
        self.elements += outside.count(b",")
        self.containers += outside.count(b"[") + objects
        self.objects += objects
        self.keys += outside.count(b":")
        self.bytes += len(outside.translate(None, b" \t\r\n"))
        return inside if len(parts) % 2 else not inside

    def _check(self) -> None:
        count = self.elements + self.containers
        if count > self._most:
            raise _too_much(f"more than {self._most} values")
        if self.containers > MOST_CONTAINERS:
            raise _too_much(f"more than {MOST_CONTAINERS} lists and objects")
        if self.keys > MOST_KEYS:
            raise _too_much(f"more than {MOST_KEYS} keys")
        if self.bytes > NUMBER_BYTES * (count + self.keys) + SLACK_BYTES:
            raise _too_much(f"numbers of more than {NUMBER_BYTES} digits")


def _too_much(what: str) -> BodyError:
    return BodyError(
        f"the request body holds {what}, which are not read; send less at once, or tensors as `safetensors`",
        "body_too_complex",
    )


def parse_json(data: bytes, bounds: Bounds = ANY) -> dict[str, Any]:
    """``data`` as a JSON object within ``bounds``.

    Raises:
        RequestError: a field holds more than ``bounds`` allow.
        BodyError: the text is empty, not UTF-8, not JSON (``NaN``, lone surrogates and more than 200 levels are
            not), not an object, or repeats a key in one object: two readers would see two different requests.
    """
    if not data.strip():
        raise _invalid("is empty; a JSON object is expected")
    outline = Outline(data, bounds.values)
    try:
        data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise _invalid(f"is not valid UTF-8 (byte {error.start})") from None
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise _invalid(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise _invalid(f"must be a JSON object, not {kind}")
    if outline.keys != (len(value) if outline.objects == 1 else _keys(value)):
        json.loads(data, object_pairs_hook=_unique)
    bounds.check(value)
    return value


def _invalid(what: str) -> BodyError:
    return BodyError(f"the request body {what}", "invalid_json")


def _keys(value: dict[str, Any]) -> int:
    """Return the number of keys of an object and of all objects in it."""
    count, rest = 0, [value]
    while rest:
        one: Any = rest.pop()
        if isinstance(one, dict):
            count += len(one)
            one = one.values()
        rest.extend(inner for inner in one if type(inner) in (dict, list))
    return count


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for name, value in pairs:
        if name in known:
            raise _invalid(f"has the key {name[:100]!a} twice in one object")
        known[name] = value
    return known
