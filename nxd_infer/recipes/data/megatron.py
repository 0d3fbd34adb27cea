"""Megatron's indexed files: ``PREFIX.bin`` has the tokens, ``PREFIX.idx`` says where documents are.

Source: Megatron-LM's format "mmap": the magic MMIDIDX, then little-endian the version (u64), the dtype's code (u8), the
numbers of sequences and of document bounds (u64), the sequences' lengths (i32) and byte offsets (i64), and the
documents' first sequences (i64).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nxd_infer.errors import RecipeError
from nxd_infer.recipes.data.rows import Documents, mapped

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
_HEADER = struct.Struct("<QBQQ")


class IndexedFile(Documents):
    """The documents of an indexed file. Raises RecipeError for one that is damaged or of another kind."""

    def __init__(self, prefix: str | Path):
        path = Path(f"{prefix}.idx")
        try:
            raw = path.read_bytes()
            size = Path(f"{prefix}.bin").stat().st_size
        except OSError as error:
            raise RecipeError(f"data.data_prefix: {error.filename} cannot be read: {error.strerror}") from None
        start = len(MAGIC)
        if raw[:start] != MAGIC or len(raw) < start + _HEADER.size:
            raise RecipeError(f"data.data_prefix: {path} is not an indexed file of Megatron's (it begins {raw[:9]!r})")
        version, code, count, documents = _HEADER.unpack_from(raw, start)
        dtype = DTYPES.get(code)
        if version != 1 or dtype is None or not np.issubdtype(dtype, np.integer):
            raise RecipeError(
                f"data.data_prefix: {path} has version {version} and dtype {code}; version 1 of integers is read"
            )
        at = start + _HEADER.size
        if len(raw) < at + 12 * count + 8 * documents:
            raise RecipeError(f"data.data_prefix: {path} is shorter than its {count} sequences: it was cut off")
        lengths = np.frombuffer(raw, "<i4", count, at).astype(np.int64)
        starts = np.frombuffer(raw, "<i8", count, at + 4 * count)
        first = np.frombuffer(raw, "<i8", documents, at + 12 * count)
        ends = np.concatenate([[0], lengths.cumsum()])
        width = np.dtype(dtype).itemsize
        in_order = lengths.min(initial=0) >= 0 and np.array_equal(starts, ends[:-1] * width)
        if not in_order or (np.diff(first, prepend=0, append=count) < 0).any():
            raise RecipeError(f"data.data_prefix: {path}: its sequences do not follow each other in {prefix}.bin")
        if ends[-1] * width > size:
            raise RecipeError(f"data.data_prefix: {prefix}.bin has {size} bytes; its index needs {ends[-1] * width}")
        self.ids = mapped(Path(f"{prefix}.bin"), np.dtype(dtype).newbyteorder("<"), int(ends[-1]))
        self.bounds = np.unique(ends[first]) if documents else ends
        self.counts = None


def blend_of(prefixes: Sequence[object], origin: str) -> list[tuple[float, str]]:
    """Return ``[0.3, "a", 0.7, "b"]`` as pairs; without weights all count the same. Raises RecipeError."""
    items = list(prefixes)
    if all(isinstance(one, str) and not _is_number(one) for one in items):
        return [(1.0, str(one)) for one in items]
    if len(items) % 2 or not all(_is_number(one) for one in items[::2]):
        raise RecipeError(f"{origin}: data.data_prefix is [weight, prefix, ...] or [prefix, ...], got {items}")
    return [(float(str(weight)), str(prefix)) for weight, prefix in zip(items[::2], items[1::2], strict=True)]


def _is_number(value: object) -> bool:
    try:
        return math.isfinite(float(str(value)))
    except ValueError:
        return False


def split_of(text: str, part: int, documents: int, origin: str) -> tuple[int, int]:
    """Return which documents ``980,10,10`` gives to training (0), validation (1) or tests (2)."""
    try:
        shares = [float(one) for one in text.split(",")]
    except ValueError:
        shares = []
    shares += [0.0] * (3 - len(shares))
    if len(shares) != 3 or sum(shares) <= 0 or min(shares) < 0:
        raise RecipeError(
            f"{origin}: data.splits_string = {text!r} must be up to three shares; the nearest is 980,10,10"
        )
    ends = [round(documents * sum(shares[:number]) / sum(shares)) for number in range(4)]
    return ends[part], ends[part + 1]
