"""NumPy values in a checkpoint: arrays and numbers as bytes, generators as their state.

NumPy is optional, and imported only if a file has NumPy values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from nxd_infer.errors import CheckpointError

GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def pack_numpy(item: Any, raw: Callable[[bytes], Any], visit: Callable[[Any, str], Any]) -> Any | None:
    """Return a NumPy value as JSON, None for other values; ``raw`` stores bytes, ``visit`` other values by path.

    Arrays are restored in C order.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(item, numpy.dtype):
        described = _described(item)
        return None if described is None else {"numpy": ["dtype", described]}
    if type(item) in (numpy.ndarray, numpy.memmap) and item.dtype == object:
        return {"numpy": ["objects", list(item.shape), [visit(one, f"[{i}]") for i, one in enumerate(item.ravel())]]}
    if type(item) in (numpy.ndarray, numpy.memmap) or isinstance(item, numpy.generic):
        described = _described(item.dtype)
        form = "scalar" if isinstance(item, numpy.generic) else "array"
        return None if described is None else {"numpy": [form, described, list(item.shape), raw(item.tobytes())]}
    if type(item) is numpy.random.Generator and type(item.bit_generator).__name__ in GENERATORS:
        return {"numpy": ["generator", visit(item.bit_generator.state, ".bit_generator.state")]}
    if type(item) is numpy.random.RandomState:
        state = item.get_state(legacy=False)
        return {"numpy": ["random", visit(state, ".get_state()")]} if state["bit_generator"] == "MT19937" else None
    return None


def _described(dtype: Any) -> Any | None:
    """Return a dtype as JSON; None if it holds objects or is not one of NumPy's own."""
    from numpy.lib import format as npy

    if dtype.hasobject or dtype.type.__module__ != "numpy":
        return None
    return npy.dtype_to_descr(dtype)


def unpack_numpy(content: Any, raw: Callable[[Any], bytes], visit: Callable[[Any], Any]) -> Any:
    """Invert :func:`pack_numpy`. Raises ValueError or TypeError for invalid content."""
    try:
        import numpy
        from numpy.lib import format as npy
    except ImportError as error:
        raise CheckpointError("the checkpoint has NumPy values, but NumPy is not installed: install numpy") from error
    form, *rest = content

    def dtype(described: Any) -> Any:
        found = npy.descr_to_dtype(_tuples(described))
        if found.hasobject:
            raise ValueError(f"{described!r:.80} holds objects, which cannot be read from bytes")
        return found

    if form == "dtype":
        return dtype(rest[0])
    if form in ("array", "scalar"):
        data = bytearray(raw(rest[2]))
        found = numpy.ndarray(tuple(rest[1]), dtype(rest[0]), data)
        if found.nbytes != len(data):
            raise ValueError(f"an array of {found.nbytes} bytes is stored as {len(data)}")
        return found if form == "array" else found[()]
    if form == "objects":
        found = numpy.empty(len(rest[1]), dtype=object)
        for i, one in enumerate(rest[1]):
            found[i] = visit(one)
        return found.reshape(rest[0])
    if form == "generator":
        state = visit(rest[0])
        if state["bit_generator"] not in GENERATORS:
            raise ValueError(f"there is no generator {state['bit_generator']!r}")
        bits = getattr(numpy.random, state["bit_generator"])()
        bits.state = state
        return numpy.random.Generator(bits)
    if form == "random":
        found = numpy.random.RandomState()
        found.set_state(visit(rest[0]))
        return found
    raise ValueError(f"NumPy has no {form!r}")


def _tuples(described: Any) -> Any:
    """Restore the tuples of a dtype description, which JSON lacks: a structure is a list of tuples."""
    if isinstance(described, str):
        return described
    if all(isinstance(one, list) and len(one) in (2, 3) and isinstance(one[0], str | list) for one in described):
        return [
            (tuple(name) if isinstance(name, list) else name, _tuples(kind), *(tuple(shape) for shape in rest))
            for name, kind, *rest in described
        ]
    return (_tuples(described[0]), tuple(described[1]))
