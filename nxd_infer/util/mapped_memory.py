"""A rank's own memory: weights that every step reads from end to end, states that fill as they are used."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nxd_infer.util.devices import HOST

_LARGE = 2 << 20
"""Bytes of a large page; a smaller piece would only waste one."""
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class Memory:
    """``nbytes`` zeros in :attr:`bytes` (uint8), mapped as long as a tensor of them lives; pages come as they are used.

    ``large`` asks for large pages: a core that walks through small ones misses its address cache every 4 KiB, which
    took up to half of the bandwidth. It is not for what is filled here and there, which would take them whole.
    """

    def __init__(self, nbytes: int, *, large: bool = False):
        self._mapping = mmap.mmap(-1, max(nbytes, 1), flags=_PRIVATE)
        if large and nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)[:nbytes]

    def clear(self) -> None:
        """Zeros again. On Linux the pages are given back instead of written."""
        if sys.platform == "linux":
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self.bytes.zero_()


class UntouchedZeros(TorchFunctionMode):
    """Inside the block ``torch.zeros`` makes large CPU tensors whose pages come as they are used.

    PyTorch's own are written. A trace builds the states of every rank and reads none: caches of keys and values as
    large as the weights would be in memory for nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.keys() - {"size", "dtype", "device"}:
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        shape = func(*args, **{**kwargs, "device": "meta"})
        if device.type != HOST.type or shape.nbytes < _LARGE:
            return func(*args, **kwargs)
        return Memory(shape.nbytes).bytes.view(shape.dtype).view(shape.shape)
