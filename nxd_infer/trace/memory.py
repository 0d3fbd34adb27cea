"""A rank's own memory: weights that every step reads from end to end, states that fill as they are used."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

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
