"""Caches that fill get large pages when more than half of one is in use, a few at a time."""

from __future__ import annotations

import ctypes
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxd_infer import native
from nxd_infer.util.mapped_memory import Memory
from tests.support.needs import needs_native

pytestmark = needs_native

PAGE = 2 << 20
HEADS, LENGTH, WIDTH = 4, 4096, 64
"""bfloat16: a large page a block."""


def made_when_asked() -> bool:
    """Whether this system makes large pages of small ones when it is asked to (Linux 6.1), and not before."""
    if "[always]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        return False
    memory = Memory(2 * PAGE).bytes
    memory.fill_(1)
    address = -(-memory.data_ptr() // PAGE) * PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 25) == 0


def aligned(nbytes: int) -> Tensor:
    """Zeros of a rank's memory for states, from a large page's begin on."""
    memory = Memory(nbytes + PAGE).bytes
    begin = -memory.data_ptr() % PAGE
    return memory[begin : begin + nbytes]


def large_pages(memory: Tensor) -> int:
    """Large pages in the mappings that ``memory`` is in."""
    low, high = memory.data_ptr(), memory.data_ptr() + memory.numel()
    count, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(address, 16) for address in first.split("-"))
            inside = start < high and low < end
        elif inside and first == "AnonHugePages:":
            count += int(rest[0]) * 1024 // PAGE
    return count


class Filling:
    """Caches of ``blocks`` blocks that fill, all rows alike."""

    def __init__(self, blocks: int, length: int = LENGTH, heads: int = HEADS, width: int = WIDTH):
        size = blocks * heads * length * width * 2
        self.memory = aligned(2 * size)
        caches = self.memory.view(torch.bfloat16).view(2, blocks, heads, length, width)
        self.heads, self.width = heads, width
        self.keys, self.values = caches[0], caches[1]
        self.operator = native.load().op("cache_attention")
        self.rows, self.at = blocks - 1, 0  # the last block is nobody's
        self.given: list[tuple[Tensor, Tensor]] = []

    def fill(self, count: int) -> None:
        shape = (self.rows, count, self.heads, self.width)
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16) for _ in range(3))
        table = torch.arange(self.rows)[:, None]
        start, length = torch.full((self.rows,), self.at), torch.full((self.rows,), count)
        self.operator(q, k, v, self.keys, self.values, table, start, length, 0.125)
        self.given.append((k, v))
        self.at += count

    def holds_what_was_given(self) -> bool:
        keys, values = (torch.cat(parts, 1).transpose(1, 2) for parts in zip(*self.given, strict=True))
        return bool(
            (self.keys[: self.rows, :, : self.at] == keys).all()
            and (self.values[: self.rows, :, : self.at] == values).all()
        )


def test_blocks_get_large_pages_behind_their_middle_and_in_turn():
    filling = Filling(4)
    before = large_pages(filling.memory)
    for _ in range(4):
        filling.fill(LENGTH // 8)
    assert large_pages(filling.memory) == before
    counts = [before]
    while filling.at < LENGTH * 3 // 4:
        filling.fill(16)
        counts.append(large_pages(filling.memory))
    made = [later - earlier for earlier, later in itertools.pairwise(counts)]
    if made_when_asked():
        assert sum(made) == 2 * filling.rows and max(made) <= 2
    else:
        assert not any(made)
    filling.fill(LENGTH // 4)
    assert large_pages(filling.memory) == counts[-1]
    assert filling.holds_what_was_given()


def test_small_blocks_share_their_pages_with_others_and_get_none():
    filling = Filling(4, length=1024)
    before = large_pages(filling.memory)
    for _ in range(16):
        filling.fill(64)
    assert large_pages(filling.memory) == before
    assert filling.holds_what_was_given()


@pytest.mark.parametrize(
    ("heads", "length", "width", "blocks_of_a_row", "offset", "by_position"),
    [
        (2, 4096, 64, 1, 0, False),  # a block of half a page
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
