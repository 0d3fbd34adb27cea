"""Safetensors files in a folder that others write to: read piece by piece, while ``safe_open`` would map the file."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.util.beneath import MOST_TEXT, BeneathPath
from nxd_infer.util.dtypes import SAFETENSORS_DTYPES

_METADATA = "__metadata__"
_MOST_DIMENSIONS = 64


class OpenedSafetensors:
    """The part of ``safe_open``'s interface that readers use. Reopens the file if it was closed meanwhile."""

    def __init__(self, file: BeneathPath):
        """Raises ValueError if it is not a safetensors file, and CheckpointError like ``file``."""
        size = int.from_bytes(file.read_part(0, 8), "little")
        if size > MOST_TEXT:
            raise ValueError(f"its header would have {size} bytes, but at most {MOST_TEXT} are read")
        try:
            header = json.loads(file.read_part(8, size))
        except RecursionError:
            raise ValueError("its header is nested too deeply") from None
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        self._metadata = header.pop(_METADATA, None)
        if not _is_metadata(self._metadata):
            raise ValueError(f"{_METADATA} is not an object of strings")
        data = 8 + size
        self._pieces = {name: _piece(file, data, name, entry) for name, entry in header.items()}
        end = data
        for name, piece in sorted(self._pieces.items(), key=lambda item: (item[1].start, item[1].stop)):
            if piece.start != end:
                raise ValueError(f"{name!r:.80} starts at byte {piece.start}, but the data before it ends at {end}")
            end = piece.stop
        if end != file.stat().st_size:
            raise ValueError(f"it has {file.stat().st_size} bytes instead of {end}")

    def __enter__(self) -> OpenedSafetensors:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: the folder closes its files."""

    def metadata(self) -> dict[str, str] | None:
        return self._metadata

    def keys(self) -> list[str]:
        return list(self._pieces)

    def get_slice(self, name: str) -> _Piece:
        if name not in self._pieces:
            raise SafetensorError(f"the file has no tensor {name!r}")
        return self._pieces[name]

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name).read()


@dataclass(frozen=True)
class _Piece:
    """A tensor in bytes ``start`` to ``stop`` of the file."""

    file: BeneathPath
    name: str
    stored: str
    shape: list[int]
    start: int
    stop: int

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return self.stored

    def __getitem__(self, slices: slice | tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor with dimensions: whole rows are read, then cut in memory."""
        first, *others = slices if isinstance(slices, tuple) else (slices,)
        begin, end, _ = first.indices(self.shape[0])
        row = (self.stop - self.start) // max(self.shape[0], 1)
        rows = self._at(self.start + begin * row, [max(end - begin, 0), *self.shape[1:]])
        return rows[(slice(None), *others)].contiguous()

    def read(self) -> Tensor:
        return self._at(self.start, self.shape)

    def _at(self, start: int, shape: list[int]) -> Tensor:
        if self.stored not in SAFETENSORS_DTYPES:
            raise CheckpointError(f"{self.file}: {self.name!r} has the unsupported dtype {self.stored}")
        out = torch.empty(shape, dtype=getattr(torch, SAFETENSORS_DTYPES[self.stored]))
        if out.numel():
            self.file.read_into(out.view(-1).view(torch.uint8).numpy().data, start)
        return out


def _piece(file: BeneathPath, data: int, name: str, entry: Any) -> _Piece:
    try:
        stored, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        fits = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
        fits = fits and all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, start, stop))
        fits = fits and math.prod(max(size, 1) for size in shape) < 1 << 60  # torch counts bytes in 63 bits
        if not fits or not isinstance(stored, str):
            raise ValueError("its shape or its offsets are invalid")
        if stored in SAFETENSORS_DTYPES:
            size = math.prod(shape) * getattr(torch, SAFETENSORS_DTYPES[stored]).itemsize
            if stop - start != size:
                raise ValueError(f"it should have {size} bytes, but has {stop - start}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r:.80} is not a tensor: {error}") from error
    return _Piece(file, name, stored, shape, data + start, data + stop)


def _is_metadata(found: Any) -> bool:
    return found is None or (isinstance(found, dict) and all(isinstance(text, str) for text in found.values()))
