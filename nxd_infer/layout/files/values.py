"""Nested values as JSON and tensors: what ``torch.save`` would take, without pickle. The inverse is in
:mod:`~nxd_infer.layout.files.unpack`.

Plain JSON values are stored as they are; everything else is an object with one key, the kind::

    {"tensor": 3}    {"dict": [[1, "one"]]}    {"set": [1, 2]}    {"path": ["PosixPath", "/data"]}

Nothing that a file names is imported, looked up among the loaded modules, or called. A dataclass, a named tuple or an
enum comes back as its class if the process allows it with ``torch.serialization.add_safe_globals``, as for
``torch.load``; its fields are then set without calling it. Otherwise a dataclass becomes a :class:`Record` of its
fields, a named tuple one of an equal class created for it, and an enum member its value.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import types
import uuid
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.arrays import pack_numpy
from nxd_infer.layout.sources import DTYPES
from nxd_infer.util.dtypes import dtype_name

__all__ = ["Record", "pack"]

INLINE = 4096
"""Largest raw memory in bytes to store as base64 text in the structure; longer memory is stored as a tensor."""
DEEPEST = 100
"""Most values within each other: Python's limit of recursion is reached earlier in reading than in writing."""
HOW = "it takes tensors, arrays, numbers, text, bytes, dates, paths, and collections and dataclasses of them"
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)
}
"""Allowed factories of a defaultdict."""
PATHS = ("PurePosixPath", "PureWindowsPath", "PosixPath", "WindowsPath")
MAPPINGS = {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
NAMESPACES: dict[str, Any] = {"namespace": types.SimpleNamespace, "arguments": argparse.Namespace}
TORCH_NAMES = (torch.dtype, torch.layout, torch.memory_format)


def _whole(number: Any) -> int:
    """Check a part of a fraction: Fraction would expand a string of ten bytes to a number of a million digits."""
    if type(number) is not int:
        raise ValueError(f"{number!r:.80} is not a part of a fraction")
    return number


BUILT: dict[str, Callable[..., Any]] = {
    "complex": complex,
    "range": range,
    "slice": slice,
    "size": lambda *sizes: torch.Size(sizes),
    "device": torch.device,
    "decimal": decimal.Decimal,
    "fraction": lambda *parts: fractions.Fraction(*map(_whole, parts)),
    "uuid": uuid.UUID,
    "date": datetime.date,
    "timedelta": datetime.timedelta,
    "timezone": datetime.timezone,
    "zone": zoneinfo.ZoneInfo,
    "time": lambda fold, zone, *parts: datetime.time(*parts, tzinfo=zone, fold=fold),
    "datetime": lambda fold, zone, *parts: datetime.datetime(*parts, tzinfo=zone, fold=fold),
}
"""Kinds that are built by calling a side-effect-free function of Python or torch with values."""


class Record(types.SimpleNamespace):
    """The fields of a dataclass that this process does not allow; ``class_name`` is its name, with the module."""

    __slots__ = ("class_name",)
    class_name: str

    def __hash__(self) -> int:  # type: ignore[override]  # it may be a key
        return hash(tuple(vars(self).items()))

    def __reduce__(self) -> Any:  # a namespace's own ignores slots
        return Record, (), (vars(self), {"class_name": self.class_name})


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _arguments(item: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the kind of BUILT that builds ``item``, and its arguments."""
    kind = type(item)
    if kind is complex:
        return "complex", (item.real, item.imag)
    if kind is range or kind is slice:
        return kind.__name__, (item.start, item.stop, item.step)
    if kind is torch.Size:
        return "size", tuple(item)
    if kind in (torch.device, decimal.Decimal, uuid.UUID):
        return kind.__name__.lower(), (str(item),)
    if kind is fractions.Fraction:
        return "fraction", (item.numerator, item.denominator)
    if kind is datetime.date:
        return "date", (item.year, item.month, item.day)
    if kind is datetime.timedelta:
        return "timedelta", (item.days, item.seconds, item.microseconds)
    if kind is datetime.timezone:
        name = item.tzname(None)
        offset = item.utcoffset(None)
        return "timezone", (offset,) if name == datetime.timezone(offset).tzname(None) else (offset, name)
    if kind is zoneinfo.ZoneInfo and item.key is not None:
        return "zone", (item.key,)
    if kind is datetime.time or kind is datetime.datetime:
        day = (item.year, item.month, item.day) if kind is datetime.datetime else ()
        clock = (item.hour, item.minute, item.second, item.microsecond)
        return kind.__name__, (item.fold, item.tzinfo, *day, *clock)
    return None


class _Packer:
    def __init__(self, down_cast_bf16: bool):
        self.tensors: list[Tensor] = []
        self._numbers: dict[tuple, int] = {}
        self._sources: list[Tensor] = []
        """The numbered tensors, kept alive so that no other tensor gets the same address."""
        self._around: dict[int, str] = {}
        """The paths of the values that the present one is in, outermost first, by their ids."""
        self._down_cast = down_cast_bf16

    def number_of(self, tensor: Tensor) -> int:
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if not tensor.numel() or key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self._sources.append(tensor)
            wide = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 2
            self.tensors.append(tensor.to(torch.bfloat16) if self._down_cast and wide else tensor)
        return self._numbers[key]

    def raw(self, data: bytes) -> Any:
        """Store bytes as base64 text, or as a tensor if there are many."""
        if len(data) <= INLINE:
            return base64.b64encode(data).decode("ascii")
        return {"tensor": self.number_of(torch.frombuffer(bytearray(data), dtype=torch.uint8))}

    def tensor(self, item: Tensor, path: str) -> Any:
        if item.layout != torch.strided or item.is_meta or item.is_quantized:
            form = "quantized" if item.is_quantized else str(item.layout)
            raise CheckpointError(f"{path} is a {form} tensor on {item.device}; only dense ones can be saved")
        requires_grad, is_parameter = item.requires_grad, isinstance(item, nn.Parameter)
        item = item.detach().resolve_conj().resolve_neg()  # materialise lazy conjugation and negation
        if item.dtype in DTYPES.values():
            stored: Any = {"tensor": self.number_of(item)}
        else:  # as bytes: safetensors lacks this dtype, or cannot read it in slices
            raw = item.contiguous().reshape(-1).view(torch.uint8)
            stored = {"viewed": [self.number_of(raw), dtype_name(item.dtype), list(item.shape)]}
        if is_parameter:
            return {"parameter": [stored, requires_grad]}
        return {"requires_grad": stored} if requires_grad else stored

    def fields(self, found: Mapping[str, Any], path: str) -> list[Any]:
        return [[name, self.visit(value, f"{path}.{name}")] for name, value in found.items()]

    def start(self, value: Any, what: str) -> Any:
        """:meth:`visit` a top-level value."""
        try:
            return self.visit(value, what)
        except RecursionError:  # the caller is deep in calls itself
            raise _too_deep([*self._around.values()][-1]) from None

    def visit(self, item: Any, path: str) -> Any:
        kind = type(item)
        if item is None or kind in (bool, str):
            return item
        if kind is int:
            return item if item.bit_length() < 4096 else {"int": hex(item)}  # Python limits decimal conversion
        if kind is float:
            return item if math.isfinite(item) else {"float": str(item)}
        if isinstance(item, Tensor):
            return self.tensor(item, path)
        if id(item) in self._around:
            raise CheckpointError(f"{_short(path)} is {self._around[id(item)]} itself, which contains it: leave it out")
        if len(self._around) == DEEPEST:
            raise _too_deep(path)
        self._around[id(item)] = path
        packed = self._visit_inside(item, kind, path)
        del self._around[id(item)]
        return packed

    def _visit_inside(self, item: Any, kind: type, path: str) -> Any:
        if isinstance(item, enum.Enum):
            return {"enum": [name_of(kind), self.visit(item.value, f"{path}.value")]}
        if kind in (bytes, bytearray):
            return {kind.__name__: self.raw(bytes(item))}
        if kind is Record:
            return {"dataclass": [item.class_name, self.fields(vars(item), path)]}
        for name, namespace in NAMESPACES.items():
            if kind is namespace:
                return {name: self.fields(vars(item), path)}
        if dataclasses.is_dataclass(kind) and not isinstance(item, Mapping):
            names = [field.name for field in dataclasses.fields(kind) if hasattr(item, field.name)]
            found = {name: getattr(item, name) for name in names} | getattr(item, "__dict__", {})
            return {"dataclass": [name_of(kind), self.fields(found, path)]}
        names = getattr(kind, "_fields", None) if isinstance(item, tuple) else None
        if names is not None:
            return {"named_tuple": [name_of(kind), self.fields(dict(zip(names, item, strict=True)), path)]}
        if isinstance(item, Mapping):
            return self.mapping(item, path)
        if isinstance(item, collections.deque):
            return {"deque": [item.maxlen, self.visit(list(item), path)]}
        if kind in (set, frozenset):  # in the same order in every process
            return {kind.__name__: sorted((self.visit(one, f"{path} element") for one in item), key=json.dumps)}
        built = _arguments(item)
        if built is not None:
            return {built[0]: [self.visit(one, path) for one in built[1]]}
        if isinstance(item, list | tuple):
            name = "list" if isinstance(item, list) else "tuple"
            return {name: [self.visit(one, f"{path}[{i}]") for i, one in enumerate(item)]}
        if isinstance(item, TORCH_NAMES):
            return {"dtype": str(item).removeprefix("torch.")}
        if kind.__name__ in PATHS and isinstance(item, pathlib.PurePath):
            return {"path": [kind.__name__, str(item)]}
        if item is ...:
            return {"ellipsis": 0}
        packed = pack_numpy(item, self.raw, lambda one, at: self.visit(one, f"{path}{at}"))
        if packed is None:
            raise CheckpointError(
                f"{path} is {_described(item)}, which a checkpoint cannot store, because only a pickle could: {HOW}"
            )
        return packed

    def mapping(self, item: Mapping[Any, Any], path: str) -> Any:
        """Pack a mapping; unknown mapping types come back as a dict."""
        pairs = [[self.visit(k, f"{path} key"), self.visit(v, f"{path}[{k!r}]")] for k, v in item.items()]
        if type(item) is collections.defaultdict:
            factory = item.default_factory
            name = None if factory is None else getattr(factory, "__name__", "")
            if name is not None and FACTORIES.get(name) is not factory:
                raise CheckpointError(
                    f"{path} is a defaultdict with the factory {_described(factory)}, which a checkpoint cannot store: "
                    f"save dict(...) of it, or use one of {', '.join(FACTORIES)}"
                )
            return {"default": [name, pairs]}
        return {next((name for name, one in MAPPINGS.items() if type(item) is one), "dict"): pairs}


def _described(item: Any) -> str:
    return f"a {type(item).__name__}" if type(item).__module__ == "builtins" else f"a {name_of(type(item))}"


def _short(path: str) -> str:
    return path if len(path) <= 200 else f"{path[:100]} ... {path[-50:]}"


def _too_deep(path: str) -> CheckpointError:
    return CheckpointError(f"{_short(path)} is nested too deeply, in more than {DEEPEST} other values: flatten them")


def pack(value: Any, down_cast_bf16: bool = False, what: str = "state_dict") -> tuple[Any, list[Tensor]]:
    """Return ``(structure, tensors)``: JSON values in which a tensor is its number. Repeated tensors are stored once.

    With ``down_cast_bf16`` floating-point tensors wider than bfloat16 become bfloat16. ``value`` is not modified;
    ``what`` is its name in messages. Raises CheckpointError for an unsupported value, with the path to it.
    """
    packer = _Packer(down_cast_bf16)
    return packer.start(value, what), packer.tensors


def pack_named(values: Mapping[str, Any]) -> tuple[Any, list[Tensor]]:
    """:func:`pack` a dictionary whose keys name the values in messages."""
    packer = _Packer(False)
    return {"dict": [[name, packer.start(value, name)] for name, value in values.items()]}, packer.tensors
