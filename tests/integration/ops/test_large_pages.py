"""Caches whose blocks become large pages while they fill hold what was written."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nxd_infer import native
from nxd_infer.backends.cpu.placement import Memory
from tests.support.needs import needs_native

pytestmark = needs_native

PAGE = 2 << 20


def aligned(nbytes: int) -> Tensor:
    """Zeros of a rank's memory for states, from a large page's begin on."""
    memory = Memory(nbytes + PAGE).bytes
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + nbytes]


@pytest.mark.parametrize(
    ("heads", "length", "width", "blocks_of_a_row", "offset", "by_position"),
    [
        (3, 4096, 64, 1, 12345 * 64, False),  # pages that blocks share, and a begin that is none of a page
        (4, 2048, 128, 2, 0, False),  # a call that crosses from one block to the next
        (1, 5000, 128, 1, 4096, False),  # a length that is no multiple of a page's positions
        (8, 1024, 128, 1, 64, True),  # positions before heads, a few of them in a page
        (1, 512, 8192, 1, 0, False),  # 128 positions in a page, fewer than there are turns
    ],
)
def test_caches_of_any_shape_hold_what_was_written(heads, length, width, blocks_of_a_row, offset, by_position):
    blocks = 2 * blocks_of_a_row
    shape = (blocks, length, heads, width) if by_position else (blocks, heads, length, width)
    size = math.prod(shape) * 2
    memory = aligned(2 * size + offset)[offset:]
    keys, values = (
        memory[place * size : (place + 1) * size].view(torch.bfloat16).view(shape).transpose(1, 2 if by_position else 1)
        for place in range(2)
    )
    assert keys.shape == (blocks, heads, length, width)
    operator = native.load().op("cache_attention")
    total, step = length * blocks_of_a_row, 640
    given = torch.randn(2, 2, total, heads, width, dtype=torch.bfloat16)  # [keys or values, row, position, head, width]
    table = torch.arange(blocks).view(2, blocks_of_a_row)
    for at in range(0, total, step):
        k, v = given[:, :, at : at + step]
        count = torch.full((2,), k.shape[1])
        operator(torch.randn_like(k), k, v, keys, values, table, torch.full((2,), at), count, 0.1)
    for cache, wanted in ((keys, given[0]), (values, given[1])):
        rows = cache.view(2, blocks_of_a_row, heads, length, width) if not by_position else cache[:, None]
        assert torch.equal(rows.transpose(2, 3).reshape(2, total, heads, width), wanted)
