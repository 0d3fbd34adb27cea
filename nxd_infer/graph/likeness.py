"""Whether Python code could tell two object graphs apart, such as two layers with the arguments of their calls.

Two are alike if a program that reads the first and one that reads the second do the same, except for the values of the
tensors that they find. What this module does not know how to compare is unlike, unless it is one and the same object.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_HEAP_TYPE = 1 << 9
"""The flag of classes that are made while the program runs, as those in Python are."""
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))
_PLAIN = (
    *(type(None), bool, int, str, bytes, complex, range, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_ITSELF = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)
"""Alike only if they are one object."""


def alike(first: Any, second: Any, free: tuple[type, ...] = ()) -> list[tuple[Tensor, Tensor]] | None:
    """Return the tensors at equal places of two object graphs, each pair once; None if the graphs are not alike.

    Paired tensors have the same class, dtype, shape, strides and device, and share memory with one another in the same
    way. What is one object in one graph, containers aside, is one in the other. Objects of the classes ``free`` are not
    read, nor whether there is one or None.
    """
    walk = _Walk(free)
    try:
        with torch._C.DisableTorchFunction():  # a tracer's mode would see each look at a tensor
            return walk.tensors if walk.alike(first, second) and walk.share_alike() else None
    except RecursionError:
        return None


class _Walk:
    def __init__(self, free: tuple[type, ...]):
        self.free = free
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.forth: dict[int, int] = {}
        self.back: dict[int, int] = {}
        self.compared: set[tuple[int, int]] = set()
        """Containers: two equal ones are as good as one, unless forward changes them, which no graph can show."""
        self.numbers: dict[tuple[int, int], int] = {}
        """Of hooks: from the first graph (1) to the second, and back (2)."""
        self.kept: list[Any] = []
        """Keeps what was made on the way, so that no number is used twice."""

    def alike(self, a: Any, b: Any) -> bool:
        kind = type(a)
        if kind is not type(b):
            return self._is_free(a, b) or self._is_free(b, a)
        if kind in _PLAIN:
            return a == b
        if kind is float:
            return repr(a) == repr(b)  # which distinguishes -0.0 and is equal for NaN
        if isinstance(a, _ITSELF):
            return a is b
        self.kept += (a, b)
        if kind in _CONTAINERS:
            if (id(a), id(b)) in self.compared:
                return True
            self.compared.add((id(a), id(b)))
            return _COMPARED[kind](self, a, b)
        if id(a) in self.forth or id(b) in self.back:
            return self.forth.get(id(a)) == id(b) and self.back.get(id(b)) == id(a)
        self.forth[id(a)], self.back[id(b)] = id(b), id(a)
        if isinstance(a, self.free):
            return True
        if isinstance(a, Tensor):
            return self._tensors(a, b)
        compare = _COMPARED.get(kind)
        if compare is not None:
            return compare(self, a, b)
        return self._objects(a, b, kind)

    def _is_free(self, a: Any, b: Any) -> bool:
        return isinstance(a, self.free) and b is None

    def each(self, a: Any, b: Any) -> bool:
        return len(a) == len(b) and all(map(self.alike, a, b))

    def items(self, a: Mapping[Any, Any], b: Mapping[Any, Any]) -> bool:
        return self.each(list(a), list(b)) and all(map(self.alike, a.values(), b.values()))

    def hooks(self, a: Mapping[int, Any], b: Mapping[int, Any]) -> bool:
        """Compare tables of hooks, whose keys are numbers that no two hooks of a process share."""
        numbers = self.numbers
        same = all(
            numbers.setdefault((1, x), y) == y and numbers.setdefault((2, y), x) == x
            for x, y in zip(a, b, strict=False)
        )
        return same and self.each(list(a.values()), list(b.values()))

    def members(self, a: Any, b: Any) -> bool:
        return a == b and all(type(member) in _PLAIN for member in a)

    def attributes(self, a: Any, b: Any, *names: str) -> bool:
        return all(self.alike(getattr(a, name), getattr(b, name)) for name in names)

    def functions(self, a: Any, b: Any) -> bool:
        """Compare functions that one ``def`` has made: what they have captured differs."""
        if a.__code__ is not b.__code__ or a.__globals__ is not b.__globals__:
            return False
        captured = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        self.kept += captured
        return self.each(*captured) and self.attributes(a, b, "__defaults__", "__kwdefaults__", "__dict__")

    def _tensors(self, a: Tensor, b: Tensor) -> bool:
        if a.layout != torch.strided or a.is_quantized or _form(a) != _form(b):
            return False
        self.tensors.append((a, b))
        return self.items(_own_attributes(a), _own_attributes(b))

    def _objects(self, a: Any, b: Any, kind: type) -> bool:
        bases = [base for base in kind.__mro__ if not _in_python(base) and base is not object]
        if any(base not in _COMPARED for base in bases):
            return a is b
        if bases and not _COMPARED[bases[0]](self, a, b):
            return False
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        return (
            all(hasattr(a, name) == hasattr(b, name) for name in slots)
            and self.attributes(a, b, *(name for name in slots if hasattr(a, name)))
            and (self._modules if issubclass(kind, nn.Module) else self.items)(_dictionary(a), _dictionary(b))
        )

    def _modules(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
        return list(a) == list(b) and all(
            (self.hooks if name in _HOOKS else self.alike)(a[name], b[name]) for name in a
        )

    def share_alike(self) -> bool:
        """Compare which of the tensors share memory."""
        forth: dict[int, int] = {}
        back: dict[int, int] = {}
        for pair in self.tensors:
            a, b = (tensor.untyped_storage()._cdata for tensor in pair)
            if forth.setdefault(a, b) != b or back.setdefault(b, a) != a:
                return False
        return True


_COMPARED: dict[type, Callable[[_Walk, Any, Any], bool]] = {
    dict: _Walk.items,
    OrderedDict: _Walk.items,
    defaultdict: lambda walk, a, b: walk.alike(a.default_factory, b.default_factory) and walk.items(a, b),
    list: _Walk.each,
    tuple: _Walk.each,
    deque: _Walk.each,
    torch.Size: _Walk.each,
    set: _Walk.members,
    frozenset: _Walk.members,
    types.MappingProxyType: _Walk.items,
    types.FunctionType: _Walk.functions,
    types.MethodType: lambda walk, a, b: walk.attributes(a, b, "__func__", "__self__"),
    functools.partial: lambda walk, a, b: walk.attributes(a, b, "func", "args", "keywords"),
}


_CONTAINERS = (dict, OrderedDict, list, tuple, deque, set, frozenset, torch.Size)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return (
        *(tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.device),
        *(tensor.requires_grad, tensor.is_conj(), tensor.is_neg()),
    )


def _own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return what programs have set on a tensor; a fake one's class has attributes of its own."""
    from torch._subclasses.fake_tensor import FakeTensor

    found = vars(tensor)
    if isinstance(tensor, FakeTensor):
        return {name: value for name, value in found.items() if name not in _fake_attributes(tensor)}
    return found


def _fake_attributes(tensor: Any) -> set[str]:
    if not _fake:
        with tensor.fake_mode:
            _fake.update(vars(torch.empty(0)))
        _fake.add("_is_param")
    return _fake


_fake: set[str] = set()
"""Names of the attributes that every fake tensor has."""


@functools.cache
def _in_python(kind: type) -> bool:
    """Return whether a class is written in Python, so that its instances hold nothing but their attributes."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return (
        bool(kind.__flags__ & _HEAP_TYPE)
        and file.endswith(".py")
        and ("__slots__" in vars(kind) or kind.__dictoffset__ != 0)
    )


def _dictionary(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
