"""How fast training is, and how fast it could be."""

from __future__ import annotations

import functools
import time

import torch


@functools.cache
def matmul_peak(dtype: torch.dtype = torch.float32, size: int = 1024) -> float:
    """Return the floating-point operations per second of a square matrix product, with this process's threads."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
