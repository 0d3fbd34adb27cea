"""Examples that are almost right: one of the seeds with a few changes, in its bytes or in the values within."""

from __future__ import annotations

import copy
import io
import json
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import yaml
from hypothesis import strategies as st


class Form(NamedTuple):
    """How an example is taken apart and put together, so that changes get past its outermost checks."""

    open: Callable[[bytes], Any] = json.loads
    """The JSON value within, or bytes; ValueError where it holds none."""
    close: Callable[[bytes, Any], bytes] = lambda example, inner: json.dumps(inner).encode()
    """An example with another value within."""


def _header(example: bytes) -> Any:
    return json.loads(parted(example)[0])


def _with_header(example: bytes, inner: Any) -> bytes:
    return joined(json.dumps(inner).encode(), parted(example)[1])


def joined(first: bytes, second: bytes) -> bytes:
    """Two files as one example; a safetensors file is its header and its tensors, joined alike."""
    return struct.pack("<Q", len(first)) + first + second


def parted(example: bytes) -> tuple[bytes, bytes]:
    (length,) = struct.unpack_from("<Q", example.ljust(8, b"\0"))
    return example[8 : 8 + length], example[8 + length :]


def _lines(example: bytes) -> Any:
    return [json.loads(line) for line in example.splitlines() if line.strip()]


def _with_lines(example: bytes, inner: Any) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in (inner if isinstance(inner, list) else [inner]))


def _yaml(example: bytes) -> Any:
    try:
        return yaml.safe_load(example)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def _with_yaml(example: bytes, inner: Any) -> bytes:
    return yaml.safe_dump(inner, sort_keys=False, allow_unicode=True).encode()


def _pickle(example: bytes) -> bytes:
    """Of a file of ``torch.save``; the zip around it is made anew, with its checksums."""
    try:
        with zipfile.ZipFile(io.BytesIO(example)) as file:
            return next(file.read(name) for name in file.namelist() if name.endswith("/data.pkl"))
    except (zipfile.BadZipFile, StopIteration, NotImplementedError, EOFError) as error:
        raise ValueError(str(error)) from error


def _with_pickle(example: bytes, inner: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(example)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, inner if name.endswith("/data.pkl") else old.read(name))
    return out.getvalue()


JSON, LINES, YAML = Form(), Form(_lines, _with_lines), Form(_yaml, _with_yaml)
SAFETENSORS, TORCH_FILE, BYTES = (
    Form(_header, _with_header),
    Form(_pickle, _with_pickle),
    Form(bytes, lambda _, new: new),
)

_NUMBERS = (0, 1, -1, 2, 63, 64, 255, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400)
_TEXTS = (
    "", "a", "..", "../x", "/etc/passwd", "\0", "\ud800", "é\u0301", "NaN", "0", "__class__", "x" * 5000, "{{", "%s",
)  # fmt: skip
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
    """A JSON value with one to three of the values within replaced, removed, or put in twice."""
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
        elif container is value:
            continue
        elif how == 3:
            del container[key]
        elif isinstance(container, dict):
            container[draw(st.sampled_from(_TEXTS) | st.text(max_size=6))] = container[key]
        else:
            container.insert(key, container[key])
    return value[""]


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
