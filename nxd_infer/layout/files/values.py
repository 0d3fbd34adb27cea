"""Nested plain values as JSON and tensors, without pickle.

Plain JSON values are stored as they are; everything else is an object with one key, the kind::

    {"tensor": 3}    {"dict": [[1, "one"]]}    {"tuple": [1, 2]}    {"numpy": ["scalar", "<f4", [], "zczMPQ=="]}

A subclass of a container comes back as the container. Nothing that a file names is imported or called.
"""

from __future__ import annotations

import base64
import collections
import json
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.sources import DTYPES
from nxd_infer.util.dtypes import dtype_name, dtype_of
from nxd_infer.util.reading import MOST_LEVELS

__all__ = ["pack", "pack_named", "require_storable", "unpack"]

INLINE = 4096
"""Largest memory in bytes to store as base64 text in the structure; longer memory is stored as a tensor."""
HOW = "it takes tensors, NumPy arrays, numbers, text, bytes, and dictionaries, lists, tuples and sets of them"
MAPPINGS: dict[str, type] = {"ordered": collections.OrderedDict, "counter": collections.Counter, "dict": dict}
SEQUENCES: dict[str, type] = {"size": torch.Size, "list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
ARRAYS = "biufc"
"""The kinds of NumPy's dtypes whose memory is all of their value: booleans and numbers."""


def require_storable(dtype: torch.dtype, what: str) -> None:
    """Raise CheckpointError for a dtype that could be written, and not be read in slices."""
    if dtype not in DTYPES.values():
        raise CheckpointError(
            f"{what} is a tensor of {dtype}, which a checkpoint does not hold; convert it (a complex one with "
            "torch.view_as_real, an unsigned one to int64)"
        )


class _Packer:
    def __init__(self, down_cast_bf16: bool):
        self.tensors: dict[str, Tensor] = {}
        self._numbers: dict[tuple, int] = {}
        self._sources: list[Tensor] = []
        """The numbered tensors, kept alive so that no other tensor gets the same address."""
        self._down_cast = down_cast_bf16

    def start(self, value: Any, what: str) -> Any:
        """Pack a top-level value, which is called ``what`` in messages."""
        try:
            return self.visit(value, what, 0)
        except RecursionError:  # the caller is deep in calls itself
            raise _too_deep(what) from None

    def visit(self, item: Any, path: str, level: int) -> Any:
        kind = type(item)
        if item is None or kind in (bool, str):
            return item
        if kind is int and item.bit_length() < 4096:  # Python limits the conversion of longer ones to text
            return item
        if kind is float:
            return item if math.isfinite(item) else {"float": str(item)}
        if kind is bytes:
            return {"bytes": self._raw(item)}
        if isinstance(item, Tensor):
            return {"tensor": self._number_of(_dense(item, path))}
        if isinstance(item, torch.dtype):
            return {"dtype": dtype_name(item)}
        if level == MOST_LEVELS:
            raise _too_deep(path)
        if isinstance(item, Mapping):
            pairs = [
                [self.visit(key, f"{path} key", level + 1), self.visit(value, f"{path}[{key!r}]", level + 1)]
                for key, value in item.items()
            ]
            return {next((name for name, one in MAPPINGS.items() if isinstance(item, one)), "dict"): pairs}
        for name, sequence in SEQUENCES.items():
            if isinstance(item, sequence):
                parts = [self.visit(one, f"{path}[{i}]", level + 1) for i, one in enumerate(item)]
                # A set is stored in the same order by every process.
                return {name: sorted(parts, key=json.dumps) if "set" in name else parts}
        packed = self._array(item)
        if packed is None:
            name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            raise CheckpointError(f"{_short(path)} is a {name}, which a checkpoint cannot store: {HOW}")
        return packed

    def _array(self, item: Any) -> Any | None:
        """Return a NumPy array or number as JSON, None for other values. NumPy is optional."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or not (type(item) in (numpy.ndarray, numpy.memmap) or isinstance(item, numpy.generic)):
            return None
        if item.dtype.kind not in ARRAYS:
            return None
        form = "scalar" if isinstance(item, numpy.generic) else "array"
        return {"numpy": [form, item.dtype.str, list(item.shape), self._raw(item.tobytes())]}

    def _raw(self, data: bytes) -> Any:
        """Store bytes as base64 text, or as a tensor if there are many."""
        if len(data) <= INLINE:
            return base64.b64encode(data).decode("ascii")
        return {"tensor": self._number_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))}

    def _number_of(self, tensor: Tensor) -> int:
        address = tensor.data_ptr() or id(tensor)  # XLA's tensors have none
        key = (address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if not tensor.numel() or key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self._sources.append(tensor)
            wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 2
            stored = tensor.to(torch.bfloat16) if self._down_cast and wide else tensor
            self.tensors[str(self._numbers[key])] = stored
        return self._numbers[key]


def _dense(tensor: Tensor, path: str) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        form = "quantized" if tensor.is_quantized else str(tensor.layout)
        raise CheckpointError(f"{path} is a {form} tensor on {tensor.device}; only dense ones can be saved")
    require_storable(tensor.dtype, path)
    return tensor.detach().resolve_neg()


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]} ... {path[-50:]}"


def _too_deep(path: str) -> CheckpointError:
    return CheckpointError(
        f"{_short(path)} is nested too deeply, in more than {MOST_LEVELS} other values, or contains itself: flatten it"
    )


def pack(value: Any, down_cast_bf16: bool = False, what: str = "state_dict") -> tuple[Any, dict[str, Tensor]]:
    """Return ``(structure, tensors)``: JSON values in which a tensor is its number, and the tensors by the text of it.

    Repeated tensors are stored once.

    With ``down_cast_bf16`` floating-point tensors wider than bfloat16 become bfloat16. ``value`` is not modified;
    ``what`` is its name in messages. Raises CheckpointError for an unsupported value, with the path to it.
    """
    packer = _Packer(down_cast_bf16)
    return packer.start(value, what), packer.tensors


def pack_named(values: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """:func:`pack` a dictionary whose keys name the values in messages."""
    packer = _Packer(False)
    return {"dict": [[name, packer.start(value, name)] for name, value in values.items()]}, packer.tensors


def unpack(structure: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Invert :func:`pack`. Raises CheckpointError if ``structure`` is not a result of it."""
    loaded: dict[int, Tensor] = {}

    def numbered(number: int) -> Tensor:
        if number not in loaded:
            loaded[number] = tensor(str(number))
        return loaded[number]

    def raw(content: Any) -> bytes:
        if isinstance(content, str):
            return base64.b64decode(content, validate=True)
        return bytes(numbered(content["tensor"]).numpy())

    def visit(item: Any) -> Any:
        if not isinstance(item, dict):
            if item is None or type(item) in (bool, int, float, str):
                return item
            raise ValueError(f"{item!r:.80} is not a value")
        ((kind, content),) = item.items()
        if kind == "tensor":
            return numbered(content)
        if kind in SEQUENCES:
            return SEQUENCES[kind]([visit(one) for one in content])
        if kind in MAPPINGS:
            return MAPPINGS[kind]({visit(key): visit(value) for key, value in content})
        if kind == "float":
            return float(content)
        if kind == "bytes":
            return raw(content)
        if kind == "dtype":
            return dtype_of(content)
        if kind == "numpy":
            form, dtype, shape, data = content
            return _array(form, dtype, shape, raw(data))
        raise ValueError(f"{kind!r:.80} is not a kind of value that this release reads")

    try:
        return visit(structure)
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, MemoryError, OverflowError) as error:
        raise CheckpointError(f"the structure of the checkpoint is damaged: {error}") from error


def _array(form: str, described: str, shape: list[int], data: bytes) -> Any:
    try:
        import numpy
    except ImportError as error:
        raise CheckpointError("the checkpoint has NumPy values, but NumPy is not installed: install numpy") from error
    dtype = numpy.dtype(described)
    if dtype.kind not in ARRAYS:
        raise ValueError(f"{described!r:.80} is not a dtype of numbers")
    loaded = numpy.frombuffer(bytearray(data), dtype).reshape(shape)
    return loaded if form == "array" else loaded[()]
