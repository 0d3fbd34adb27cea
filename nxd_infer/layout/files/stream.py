"""Write a safetensors file with only one of its tensors in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor

from nxd_infer.layout.sources import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

STORED_DTYPES = frozenset(_NAMES)
"""The dtypes that a safetensors file can hold."""

_LINE = 64
"""Bytes of a cache line."""


def _nbytes(entry: tuple[str, torch.dtype, Sequence[int]]) -> int:
    return math.prod(entry[2]) * entry[1].itemsize


def write_safetensors(
    file: BinaryIO,
    entries: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    tensor: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``tensor(name)`` for each ``(name, dtype, shape)`` to a safetensors file.

    Whole cache lines come first, then the widest dtypes: the format has no gaps, and files are mapped, so a float after
    three booleans would be misaligned.
    """
    entries = sorted(entries, key=lambda entry: (_nbytes(entry) % _LINE != 0, -entry[1].itemsize))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in entries:
        start, end = end, end + _nbytes((name, dtype, shape))
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _LINE)  # aligns the data to cache lines, as far as sizes allow
    file.write(len(text).to_bytes(8, "little") + text)
    for name, _, _ in entries:
        flat = tensor(name).contiguous().reshape(-1)
        if flat.numel():
            file.write(flat.view(torch.uint8).numpy().data)
        del flat  # free it before the next one is created
    file.flush()
