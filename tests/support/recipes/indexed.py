"""Writes Megatron's indexed files."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nxd_infer.recipes.data.megatron import DTYPES, MAGIC


def write_indexed(prefix: str | Path, documents: Sequence[Sequence[int]], dtype: type = np.int32) -> None:
    code = next(code for code, one in DTYPES.items() if one is dtype)
    lengths = [len(one) for one in documents]
    width = np.dtype(dtype).itemsize
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1] * width if lengths else np.zeros(0)
    with Path(f"{prefix}.bin").open("wb") as data:
        for one in documents:
            data.write(np.asarray(one, np.dtype(dtype).newbyteorder("<")).tobytes())
    with Path(f"{prefix}.idx").open("wb") as index:
        index.write(MAGIC + struct.pack("<QBQQ", 1, code, len(documents), len(documents) + 1))
        index.write(np.asarray(lengths, "<i4").tobytes() + np.asarray(starts, "<i8").tobytes())
        index.write(np.arange(len(documents) + 1, dtype="<i8").tobytes())
