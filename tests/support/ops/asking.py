"""Products and attention over sizes at which kernels ask for what they read soon."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def digest(library: Any) -> str:
    """Of every bit of the results, which no number of threads changes."""
    found = set()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.add(_digest(library))
    (only,) = found
    return only


def _digest(library: Any) -> str:
    linear, attention = library.op("packed_linear"), library.op("cache_attention")
    torch.manual_seed(0)
    found = hashlib.sha256()
    for rows in (1, 2, 3, 8, 13, 14, 16, 40):
        for dtype in (torch.bfloat16, torch.float32):
            y = linear(torch.randn(rows, 130, dtype=dtype), torch.randn(79, 130, dtype=dtype), None)
            found.update(y.view(torch.uint8).numpy().tobytes())
    starts, length = (0, 1, 126, 127, 300), 384
    for dtype, size in [*((torch.bfloat16, size) for size in (32, 64, 80, 96, 128)), (torch.float32, 64)]:
        for heads, shared, queries in ((4, 2, 1), (4, 2, 3), (2, 2, 1), (2, 2, 3), (8, 2, 1)):
            q, k, v = (torch.randn(len(starts), queries, h, size, dtype=dtype) for h in (heads, shared, shared))
            # what is behind the context is no number
            caches = [torch.full((len(starts) + 1, shared, length, size), float("nan"), dtype=dtype) for _ in "kv"]
            for row, start in enumerate(starts):
                for cache in caches:
                    cache[row, :, :start] = torch.randn(shared, start, size)
            table = torch.arange(len(starts)).view(-1, 1)
            live = torch.full((len(starts),), queries)
            y = attention(q, k, v, *caches, table, torch.tensor(starts), live, size**-0.5)
            assert y.isfinite().all(), (dtype, size)
            found.update(y.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
