"""Kernels that ask for what they read soon, and those that leave it to the processor (``NXD_CPU_ASKS``): same bits."""

from __future__ import annotations

import os
import subprocess
import sys

from nxd_infer import native

CODE = """
import hashlib, torch
from nxd_infer import native
lib = native.load()
linear, attention = lib.op("packed_linear"), lib.op("cache_attention")
torch.manual_seed(0)
found = hashlib.sha256()
for rows in (1, 2, 3, 8, 13, 14, 16, 40):
    for dtype in (torch.bfloat16, torch.float32):
        y = linear(torch.randn(rows, 130, dtype=dtype), torch.randn(79, 130, dtype=dtype), None)
        found.update(y.view(torch.uint8).numpy().tobytes())
for size in (32, 64, 80, 96, 128):
    for queries in (1, 3):
        starts, (heads, shared, length) = (0, 1, 126, 127, 300), (4, 2, 384)
        q, k, v = (
            torch.randn(len(starts), queries, h, size, dtype=torch.bfloat16) for h in (heads, shared, shared)
        )
        # what is behind the context is no number
        caches = [torch.full((len(starts) + 1, shared, length, size), float("nan"), dtype=torch.bfloat16) for _ in "kv"]
        for row, start in enumerate(starts):
            for cache in caches:
                cache[row, :, :start] = torch.randn(shared, start, size)
        table = torch.arange(len(starts)).view(-1, 1)
        live = torch.full((len(starts),), queries)
        y = attention(q, k, v, *caches, table, torch.tensor(starts), live, size**-0.5)
        assert y.isfinite().all(), size
        found.update(y.view(torch.uint8).numpy().tobytes())
print(found.hexdigest())
"""


def digest(asks: str, threads: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "NXD_CPU_ASKS": asks, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_asking_changes_no_bit():
    native.load()  # built once, not by each of the processes
    assert len({digest(asks, threads) for asks, threads in (("0", 1), ("1", 1), ("0", 2), ("", 2))}) == 1
