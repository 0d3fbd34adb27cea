"""Examples that are almost right: one of the seeds with a few changes, in its bytes or in the values within."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.forms import Form

_NUMBERS = (0, 1, -1, 2, 63, 64, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400)
_TEXTS = (
    "",
    "a",
    "..",
    "../x",
    "/etc/passwd",
    "\0",
    "\ud800",
    "é\u0301",
    "NaN",
    "0",
    "__class__",
    "x" * 5000,
    "{{",
    "%s",
)
_BYTES = (b"\0", b"\xff" * 8, b"[" * 3000, b'{"a":' * 1000, b'"', b"\\", b"\xed\xa0\x80", b"1e999", b"NaN", b"-", b"\n")

numbers = (
    st.sampled_from(_NUMBERS) | st.integers(-5, 70) | st.sampled_from([0.5, 1e308, -0.0, float("nan"), float("inf")])
)
plain = st.none() | st.booleans() | numbers | st.sampled_from(_TEXTS) | st.text(max_size=8)


def _nested(levels: int, key: bool) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if key else [value]
    return value


values = (
    plain
    | st.lists(plain, max_size=4)
    | st.dictionaries(st.sampled_from(_TEXTS) | st.text(max_size=4), plain, max_size=3)
    | st.builds(_nested, st.sampled_from([3, 150, 900]), st.booleans())
)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of every value within, those of containers first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        found.append((value, key))
        if len(found) < 20000:
            _places(one, found)
    return found


@st.composite
def changed_value(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three of the values within replaced, removed, moved, or put in twice."""
    try:
        value = {"": copy.deepcopy(value)}
        places = _places(value, [])
    except RecursionError:
        return draw(values)
    for _ in range(draw(st.integers(1, 3))):
        container, key = places[draw(st.integers(0, len(places) - 1))]
        if key not in container if isinstance(container, dict) else key >= len(container):
            continue
        how = draw(st.integers(0, 5))
        if how <= 2:
            container[key] = draw(values)
        elif how == 3:
            other, name = places[draw(st.integers(0, len(places) - 1))]
            if name in other if isinstance(other, dict) else name < len(other):
                container[key] = copy.deepcopy(other[name]) if _small(other[name]) else None
        elif container is value:
            continue
        elif how == 4:
            del container[key]
        elif isinstance(container, dict):
            container[draw(st.sampled_from(_TEXTS) | st.text(max_size=6))] = container[key]
        else:
            container.insert(key, container[key])
    return value[""]


def _small(value: Any) -> bool:
    return not isinstance(value, (dict, list)) or len(_places(value, [])) < 1000


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with one to four pieces overwritten, taken out, put in, or with an end."""
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        piece = draw(st.sampled_from(_BYTES) | st.binary(min_size=1, max_size=6))
        how = draw(st.integers(0, 4))
        if how == 0:
            data = data[:at] + piece + data[at + len(piece) :]
        elif how == 1:
            data = data[:at] + piece + data[at:]
        elif how == 2:
            data = data[:at] + data[at + draw(st.integers(1, 40)) :]
        elif how == 3:
            data = data[:at]
        elif data:
            bit = 1 << draw(st.integers(0, 7))
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
    return data


@st.composite
def changed(draw: st.DrawFn, seeds: list[bytes], form: Form) -> bytes:
    """One of the seeds, changed."""
    seed = draw(st.sampled_from(seeds))
    if draw(st.integers(0, 3)):
        try:
            inner = form.open(seed)
            new = changed_bytes(inner) if isinstance(inner, bytes) else changed_value(inner)
            return form.close(seed, draw(new))
        except (ValueError, RecursionError, MemoryError):
            pass
    return draw(changed_bytes(seed))
