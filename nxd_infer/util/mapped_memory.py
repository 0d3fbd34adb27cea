"""Memory mappings for a rank: weights that every step reads completely, states that fill up gradually."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nxd_infer.util.devices import HOST

_LARGE = 2 << 20
"""Size of a large page; a smaller mapping would only waste one."""
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)


class Memory:
    """``nbytes`` zeros in :attr:`bytes` (uint8), mapped while a tensor of them lives; pages are allocated on first use.

    ``large`` requests large pages: with small ones a sequential read misses the TLB every 4 KiB, which cost up to half
    of the bandwidth. Not for sparsely filled memory, which would then use full large pages.
    """

    def __init__(self, nbytes: int, *, large: bool = False):
        self._mapping = mmap.mmap(-1, max(nbytes, 1), flags=_PRIVATE)
        if large and nbytes >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: Tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)[:nbytes]

    def clear(self) -> None:
        """Reset to zeros. On Linux the pages are released instead of written."""
        if sys.platform == "linux":
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self.bytes.zero_()


class UntouchedZeros(TorchFunctionMode):
    """Inside the block ``torch.zeros`` creates large CPU tensors whose pages are allocated on first use.

    PyTorch writes its zeros. A trace creates the states of every rank and reads none, so key/value caches as large as
    the weights would use memory for nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.keys() - {"size", "dtype", "device"}:
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        shape = func(*args, **{**kwargs, "device": "meta"})
        if device.type != HOST.type or shape.nbytes < _LARGE:
            return func(*args, **kwargs)
        # Reading a large page that nobody has written costs one page fault.
        return Memory(shape.nbytes, large=True).bytes.view(shape.dtype).view(shape.shape)
