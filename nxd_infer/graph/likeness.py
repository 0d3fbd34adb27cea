"""Whether Python code could tell two object graphs apart, such as two layers with the arguments of their calls.

Two are alike if a program that reads the first and one that reads the second do the same, except for the values of the
tensors that they find. They are compared as pickles, in which a tensor is its form, and a class, a module or what is
written in C is its identity. What cannot be pickled, or says itself how, is unlike.
"""

from __future__ import annotations

import enum
import io
import pickle  # nosec B403  # nothing is unpickled
import types
from typing import Any

import torch
from torch import Tensor, nn

_ITSELF = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)
"""Alike only if they are one object."""
_SAYS_HOW = ("__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs_ex__")
"""Methods by which a class decides what of it is pickled."""
_OF_MODULES = getattr(nn.Module, "__getstate__", None)


def alike(first: Any, second: Any, free: tuple[type, ...] = ()) -> list[tuple[Tensor, Tensor]] | None:
    """Return the tensors at equal places of two object graphs, each pair once; None if the graphs are not alike.

    Paired tensors have the same class, dtype, shape, strides and device, and share memory with one another in the same
    way. What is one object in one graph is one in the other. Objects of the classes ``free`` are not read.
    """
    try:
        with torch._C.DisableTorchFunction():  # a tracer's mode would see each look at a tensor
            a, b = (_Description(value, free) for value in (first, second))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return list(zip(a.tensors, b.tensors, strict=True)) if a.text == b.text else None


class _Description(pickle.Pickler):
    def __init__(self, value: Any, free: tuple[type, ...]):
        file = io.BytesIO()
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._free = free
        self._storages: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.dump(value)
        self.text = file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        """Say how a value of no simple type is written: ``(_same, what is compared, what is written after it)``."""
        if value is _same:
            return NotImplemented
        if isinstance(value, self._free):
            return _same, ()
        if isinstance(value, _ITSELF):
            return _same, (id(value),)
        if isinstance(value, types.FunctionType):  # what functions that one ``def`` has made have captured differs
            captured = [cell.cell_contents for cell in value.__closure__ or ()]
            parts = (captured, value.__defaults__, value.__kwdefaults__, vars(value))
            return _same, (id(value.__code__), id(value.__globals__)), parts
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return _same, self._form(value), _own_attributes(value)
        own = [getattr(type(value), name, None) for name in _SAYS_HOW]
        if any(isinstance(method, types.FunctionType) and method is not _OF_MODULES for method in own):
            raise pickle.PicklingError(f"{type(value).__name__} may hide what it holds")
        return NotImplemented

    def _form(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise pickle.PicklingError(f"a tensor of layout {tensor.layout}")
        storage = self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages))
        return (
            *(id(type(tensor)), str(tensor.dtype), str(tensor.device), storage, tensor.storage_offset()),
            *(tuple(tensor.shape), tensor.stride(), tensor.requires_grad, tensor.is_conj(), tensor.is_neg()),
        )


def _same(*_: Any) -> None:
    """Stand for what is written; nothing ever calls it."""


def _own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return what programs have set on a tensor; a fake one's class has attributes of its own."""
    from torch._subclasses.fake_tensor import FakeTensor

    attributes = vars(tensor)
    if not isinstance(tensor, FakeTensor):
        return attributes
    if not _of_fakes:
        with tensor.fake_mode:
            _of_fakes.update(vars(torch.empty(0)))
        _of_fakes.add("_is_param")
    return {name: value for name, value in attributes.items() if name not in _of_fakes}


_of_fakes: set[str] = set()
"""Names of the attributes that every fake tensor has."""
