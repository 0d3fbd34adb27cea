"""What is the same wherever files are read that others may have written: checksums, JSON, how deep it may be nested."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from typing import Any

MOST_LEVELS = 100
"""Lists and objects of one file within each other: who looks through them calls itself at each, and one that holds
itself has no end."""
_CHUNK = 1 << 20


def sha256_and_size(file: io.FileIO, progress: Callable[[int], object] | None = None) -> tuple[str, int]:
    """The checksum of what is left to read of a file, and how many bytes that is; without the GIL, beside other work.

    ``progress`` is called with the bytes of each part; ``hashlib.file_digest`` (Python 3.11) tells neither.
    """
    digest, size = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_CHUNK))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        size += count
        if progress is not None:
            progress(count)
    return digest.hexdigest(), size


def sha256_of(path: str | os.PathLike[str], progress: Callable[[int], object] | None = None) -> str:
    """The checksum of a file, read once from front to back; without the GIL, so beside other work.

    ``progress`` is called with the bytes of each part.
    """
    with open(path, "rb", buffering=0) as file:
        return sha256_and_size(file, progress)[0]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Two values of one key are a ValueError: readers differ in which of them they take."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.80} stands twice")
        found[key] = value
    return found


def parse_json(text: bytes | str) -> Any:
    """A JSON value. Raises ValueError, for an object with two values of one key too: readers differ in which counts."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply to be one of ours") from None
