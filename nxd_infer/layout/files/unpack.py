"""Unpack values packed by :mod:`~nxd_infer.layout.files.values`, from an untrusted file."""

from __future__ import annotations

import base64
import collections
import dataclasses
import enum
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import CheckpointError
from nxd_infer.layout.files.arrays import unpack_numpy
from nxd_infer.layout.files.values import (
    BUILT,
    FACTORIES,
    MAPPINGS,
    NAMESPACES,
    PATHS,
    SEQUENCES,
    TORCH_NAMES,
    Record,
    name_of,
)

__all__ = ["unpack"]

MOST_ALIKE = 1000
"""Most values with equal hashes in a set or a dictionary: each is compared with all before it."""


def _require_spread(keys: Iterable[Any]) -> None:
    """Raise ValueError for more than MOST_ALIKE keys with equal hashes, which never happens by chance."""
    alike = collections.Counter(map(hash, keys))
    if alike and max(alike.values()) > MOST_ALIKE:
        raise ValueError(f"more than {MOST_ALIKE} elements of a set or a dictionary have the same hash")


def _allowed() -> dict[str, type]:
    """Return the classes that this process allows to be created from files, by name."""
    found = {}
    for one in torch.serialization.get_safe_globals():
        kind, name = one if isinstance(one, tuple) else (one, None)
        if isinstance(kind, type):
            found[name or name_of(kind)] = kind
    return found


class _Unpacker:
    def __init__(self, tensor: Callable[[int], Tensor]):
        self._tensor = tensor
        self._made: dict[int, Tensor] = {}
        self._allowed = _allowed()

    def tensor(self, number: int) -> Tensor:
        if number not in self._made:
            self._made[number] = self._tensor(number)
        return self._made[number]

    def raw(self, content: Any) -> bytes:
        if isinstance(content, str):
            return base64.b64decode(content, validate=True)
        return bytes(self.tensor(content["tensor"]).numpy())

    def pairs(self, content: Any) -> list[tuple[Any, Any]]:
        found = [(self.visit(key), self.visit(value)) for key, value in content]
        _require_spread(key for key, _ in found)
        return found

    def visit(self, item: Any) -> Any:
        if not isinstance(item, dict):
            if item is None or type(item) in (bool, int, float, str):
                return item
            raise CheckpointError(f"the structure of the checkpoint is damaged at {str(item)[:80]!r}")
        ((kind, content),) = item.items()
        if kind == "tensor":
            return self.tensor(content)
        if kind in SEQUENCES:
            found = [self.visit(one) for one in content]
            if "set" in kind:
                _require_spread(found)
            return SEQUENCES[kind](found)
        if kind in MAPPINGS:
            return MAPPINGS[kind](dict(self.pairs(content)))
        if kind in NAMESPACES:
            made = NAMESPACES[kind]()
            vars(made).update(self.pairs(content))  # not as arguments: "self" may be a key
            return made
        if kind in BUILT:
            return BUILT[kind](*(self.visit(one) for one in content))
        special = getattr(self, f"_{kind}", None) if kind in _SPECIAL else None
        if special is None:
            raise CheckpointError(f"the structure of the checkpoint has the unknown kind {kind!r}")
        return special(content)

    def _viewed(self, content: Any) -> Tensor:
        number, dtype, shape = content
        return self.tensor(number).clone().view(self._dtype(dtype)).reshape(shape)

    def _parameter(self, content: Any) -> Tensor:
        return nn.Parameter(self.visit(content[0]), requires_grad=bool(content[1]))

    def _requires_grad(self, content: Any) -> Tensor:
        return self.visit(content).detach().requires_grad_()

    def _dtype(self, content: Any) -> Any:
        found = getattr(torch, content, None)
        if not isinstance(found, TORCH_NAMES):
            raise ValueError(f"torch has no dtype {content!r}")
        return found

    def _float(self, content: Any) -> float:
        return float(content)

    def _int(self, content: Any) -> int:
        return int(content, 16)

    def _ellipsis(self, content: Any) -> Any:
        return ...

    def _bytes(self, content: Any) -> bytes:
        return self.raw(content)

    def _bytearray(self, content: Any) -> bytearray:
        return bytearray(self.raw(content))

    def _deque(self, content: Any) -> Any:
        found = self.visit(content[1])
        if type(found) is not list:  # a range may have any number of elements
            raise ValueError(f"a deque must be made from a list, got {type(found).__name__}")
        return collections.deque(found, content[0])

    def _default(self, content: Any) -> Any:
        name, pairs = content
        return collections.defaultdict(None if name is None else FACTORIES[name], self.pairs(pairs))

    def _path(self, content: Any) -> pathlib.PurePath:
        name, text = content
        if name not in PATHS:
            raise ValueError(f"there is no path of the kind {name!r}")
        if name == type(pathlib.Path()).__name__:
            return pathlib.Path(text)
        return (pathlib.PureWindowsPath if "Windows" in name else pathlib.PurePosixPath)(text)

    def _enum(self, content: Any) -> Any:
        kind, value = self._allowed.get(content[0]), self.visit(content[1])
        return kind(value) if kind is not None and issubclass(kind, enum.Enum) else value

    def _dataclass(self, content: Any) -> Any:
        name, fields = content[0], dict(self.pairs(content[1]))
        kind = self._allowed.get(name)
        if kind is None or not dataclasses.is_dataclass(kind):
            record = Record()
            record.class_name = str(name)
            vars(record).update(fields)
            return record
        made = object.__new__(kind)
        for field, value in fields.items():
            object.__setattr__(made, field, value)
        return made

    def _named_tuple(self, content: Any) -> Any:
        name, fields = content[0], dict(self.pairs(content[1]))
        kind = self._allowed.get(name)
        if kind is None or getattr(kind, "_fields", None) != tuple(fields):
            module, _, short = name.rpartition(".")
            kind = collections.namedtuple(short, list(fields), module=module)
        return tuple.__new__(kind, fields.values())

    def _numpy(self, content: Any) -> Any:
        return unpack_numpy(content, self.raw, self.visit)


_SPECIAL = {name.removeprefix("_") for name in vars(_Unpacker) if name.startswith("_") and not name.startswith("__")}


def unpack(structure: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Invert :func:`pack`. Raises CheckpointError if ``structure`` is not a result of it."""
    try:
        return _Unpacker(tensor).visit(structure)
    except CheckpointError:
        raise
    except (
        *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError),
        *(MemoryError, SystemError, OSError),  # a huge array, a time zone that is a folder
    ) as error:
        raise CheckpointError(f"the structure of the checkpoint is damaged: {error}") from error
