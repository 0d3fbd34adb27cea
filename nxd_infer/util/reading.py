"""Read files that others may have written: checksums, JSON, limits of nesting."""

from __future__ import annotations

import io
import json
import os
from typing import Any

from blake3 import blake3

MOST_LEVELS = 100
"""Maximum nesting of lists and objects: code that visits them recurses at each level, and a self-referential one
would never end."""
BLAKE3 = "blake3"
"""The checksum of files, and its key in records. It is as hard to forge as sha256; on one core it read 2.5 GiB/s, that
0.2, or 1.1 on a processor with instructions for it."""
_CHUNK = 4 << 20
"""A thread that hashes waits for the interpreter after each: beside a busy thread 1 MiB took three times as long."""


def checksum_and_size(file: io.FileIO, threads: int = 1) -> tuple[str, int]:
    """Return the checksum of the rest of a file in hexadecimal, and its size; releases the GIL. ``threads``: at most so
    many, which stay; ``blake3.AUTO`` for one per core."""
    digest, size = blake3(max_threads=threads), 0
    buffer = memoryview(bytearray(max(1, min(_CHUNK, os.fstat(file.fileno()).st_size))))
    while count := file.readinto(buffer):
        digest.update(buffer[:count])
        size += count
    return digest.hexdigest(), size


def checksum_of(path: str | os.PathLike[str]) -> str:
    """Return the checksum of a file in hexadecimal, read once from start to end; releases the GIL."""
    with open(path, "rb", buffering=0) as file:
        return checksum_and_size(file)[0]


def checksum_of_bytes(data: bytes) -> str:
    """Return the checksum of ``data`` in hexadecimal."""
    return blake3(data).hexdigest()


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises ValueError if a key occurs twice, because readers differ in which value they use."""
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise ValueError(f"the key {key!r:.80} stands twice")
        fields[key] = value
    return fields


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ValueError also for an object that has a key twice, because readers differ in that case."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys)
    except RecursionError:
        raise ValueError("it is nested too deeply to be one of ours") from None
