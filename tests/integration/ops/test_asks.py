"""Kernels that ask for what they read soon, or leave it to the processor (``NXD_INFER_CPU_ASKS``): same bits."""

from __future__ import annotations

import pytest

from nxd_infer import native
from tests.support.needs import needs_native
from tests.support.ops.levels import run_at

pytestmark = needs_native

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
cases = [(torch.bfloat16, size) for size in (32, 64, 80, 96, 128)] + [(torch.float32, 64)]
for dtype, size in cases:
    for heads, shared, queries in ((4, 2, 1), (4, 2, 3), (2, 2, 1), (2, 2, 3), (8, 2, 1)):
        starts, length = (0, 1, 126, 127, 300), 384
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
print(found.hexdigest())
"""


@pytest.mark.parametrize("level", ["avx2", "avx512_bf16"])
def test_asking_changes_no_bit(level):
    library = native.load()
    found = {
        run_at(library, level, CODE, threads, NXD_INFER_CPU_ASKS=asks)
        for asks, threads in (("0", 1), ("1", 1), ("0", 2))
    }
    assert len(found) == 1


def test_another_answer_is_refused():
    with pytest.raises(AssertionError, match="NXD_INFER_CPU_ASKS='no' is neither 0 nor 1"):
        run_at(native.load(), "avx2", CODE, NXD_INFER_CPU_ASKS="no")
