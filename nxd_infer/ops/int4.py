"""Weights of four bits for :func:`nxd_infer.ops.packed.packed_linears`, and the rows of eight bits that they multiply.

A row [K] of a weight has groups of adjacent ``k``: ``w = (u - zero) * scale`` with ``u`` in 0 .. 15 and a scale in
bfloat16. The zero is 8, or, with *zeros*, any of 0, 1/16 .. 15. Of sixteen scales (and zeros) a group has those with
the least squared error. The packed weight is uint8 [N, groups, bytes]: of a group and row half a byte for each ``k``,
two for the scale, one for the zero; ``csrc/operators/packed/nibbles.h`` has the order. A K that is no multiple of the
group is filled up with zeros; a group is smaller than was asked for where that takes fewer bytes.

A row of x is rounded likewise, in cells of 32 adjacent ``k``, to -127 .. 127 with a float32 scale, so that products are
sums of whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CELL = 32
"""Values of k that are summed as whole numbers; groups are multiples of it."""
EIGHT = 8
"""Rows whose numbers are adjacent in a block."""
BLOCK = 32
TRIES = 16
SMALLEST = 2.0**-120
"""A smaller scale is 0: its inverse would overflow."""


# --- shapes -------------------------------------------------------------------------------------------


def packed_shape(shape: Sequence[int], group: int, zeros: bool) -> list[int]:
    """Return the shape [N, groups, bytes] of a weight [N, K] in groups of at most ``group``."""
    *rows, K = shape
    choices = [(-(-K // size), size // 2 + 2 + zeros) for size in range(CELL, group + 1, CELL)]
    return [*rows, *min(choices, key=lambda choice: (math.prod(choice), choice[0]))]


def form_of(packed: Tensor) -> tuple[int, bool]:
    """Return the size of a packed weight's groups, and whether it has zeros."""
    size = packed.shape[2]
    return (size - 2) // 2 * 4, size % 2 != 0


# --- rounding -----------------------------------------------------------------------------------------


def quantize(weight: Tensor, group: int, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(u, scale, zero)`` of a weight [N, K] in groups of ``group``: uint8 [N, groups, group], and float32
    [N, groups] each. A group with a value that is not finite has the scale NaN."""
    w = F.pad(weight.float(), (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    least = torch.full_like(low, torch.inf)
    scale, inverse, zero = torch.full_like(low, torch.nan), torch.zeros_like(low), torch.zeros_like(low)
    for number in range(TRIES):
        some = _steps(number, zeros, low, high)
        errors = torch.zeros_like(low)
        for k in range(group):  # in this order, which is the native operator's
            apart = (_whole(w[..., k], *some[1:]) - some[2]) * some[0] - w[..., k]
            errors += apart * apart
        better = errors < least
        least, scale, inverse, zero = (
            torch.where(better, new, old)
            for new, old in zip((errors, *some), (least, scale, inverse, zero), strict=True)
        )
    return _whole(w, inverse[..., None], zero[..., None]).nan_to_num(15).to(torch.uint8), scale, zero


def _steps(number: int, zeros: bool, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale, its inverse and the zero of one try, of groups whose values are in ``low .. high``.

    Without zeros the value of largest magnitude is at 6.75 to 9 steps on the side of -8, or 6.25 to 7.5 on that of 7.
    With zeros the range is cut by up to 3/16 on either side.
    """
    if zeros:
        lowest = low * (1 - number % 4 / 16)
        found = (high * (1 - number // 4 / 16) - lowest) / 15
    else:
        most = -6.75 - 0.25 * number if number < 10 else 6.25 + 0.25 * (number - 10)
        lowest, found = low, torch.where(high < -low, low, high) / most
    half = found.to(torch.bfloat16).float()
    scale = torch.where(half.abs() < SMALLEST, 0.0, half)
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    sixteenths = (-lowest * inverse * 16).round().clamp(max=240)
    return scale, inverse, sixteenths / 16 if zeros else torch.full_like(scale, 8.0)


def _whole(w: Tensor, inverse: Tensor, zero: Tensor) -> Tensor:
    return (w * inverse + zero).clamp(0, 15).round()


def dequantize(u: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the float32 weight [N, groups * group] of what :func:`quantize` returned."""
    return ((u - zero[..., None]) * scale[..., None]).flatten(1)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(q, scale)`` of x [..., K] in cells: float32 [..., cells, 32], whole numbers, and [..., cells]."""
    wide = F.pad(x.float(), (0, -x.shape[-1] % CELL)).unflatten(-1, (-1, CELL))
    scale = wide.abs().amax(-1) / 127
    scale = torch.where(scale.isfinite(), torch.where(scale == 0, 1.0, scale), torch.nan)
    return (wide / scale[..., None]).clamp(-127, 127).round().nan_to_num(127), scale


def rounded_input(x: Tensor) -> Tensor:
    """Return x [..., K] as it is multiplied, in its dtype."""
    q, scale = round_rows(x)
    return (q * scale[..., None]).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


# --- packing ------------------------------------------------------------------------------------------


def pack(weight: Tensor, group: int, zeros: bool, out: Tensor | None = None, library: Any = None) -> Tensor:
    """Quantize and pack ``weight`` [N, K], into ``out`` if given.

    With a ``library`` (``native.NativeLibrary``) this is fast; without one it is plain PyTorch, bit-equal.
    """
    out = torch.empty(packed_shape(weight.shape, group, zeros), dtype=torch.uint8) if out is None else out
    if library is not None:
        library.op("pack_int4")(out, weight)
        return out
    size, _ = form_of(out)
    u, scale, zero = quantize(weight, size, zeros)
    for row in range(0, out.shape[0], BLOCK):
        at, rows = slice(row, row + BLOCK), min(BLOCK, out.shape[0] - row)
        halves = u[at].unflatten(-1, (-1, 2, 4))
        numbers = torch.empty(out.shape[1], rows * size // 2, dtype=torch.uint8)
        numbers[:, _places(rows, size)] = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(2).transpose(0, 1)
        scales = scale[at].T.to(torch.bfloat16).flatten().clone().view(torch.uint8).view(out.shape[1], -1)
        parts = [numbers, scales] + [(zero[at].T * 16).to(torch.uint8)] * zeros
        out[at].view(-1).copy_(torch.cat(parts, 1).flatten())
    return out


def unpack(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(u, scale, zero)`` of a packed weight, as :func:`quantize` does; exact."""
    group, zeros = form_of(packed)
    blocks = []
    for block in packed.split(BLOCK):
        rows, groups, _ = block.shape
        flat = block.reshape(groups, -1)
        numbers, scales, zero = flat.split([rows * group // 2, 2 * rows, rows * zeros], 1)
        both = numbers[:, _places(rows, group)].transpose(0, 1).unflatten(-1, (-1, 4))
        u = torch.stack((both & 15, both >> 4), 3).flatten(2)
        scale = scales.flatten().clone().view(torch.bfloat16).view(groups, rows).float().T
        blocks.append((u, scale, zero.T / 16 if zeros else torch.full_like(scale, 8.0)))
    u, scale, zero = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return u, scale, zero


def _places(rows: int, group: int) -> Tensor:
    """Return where each byte [rows, group / 2] of a group of a block is."""
    c, byte = torch.arange(rows)[:, None], torch.arange(group // 2)
    first = c // EIGHT * EIGHT
    return first * group // 2 + (byte // 4 * (rows - first).clamp(max=EIGHT) + c - first) * 4 + byte % 4


def linear(x: Tensor, packed: Tensor) -> Tensor:
    """Return the product of x [..., K] and a packed weight [N, groups, bytes] in float32, as the native operator adds:
    ``(sum(u q) - zero sum(q)) * (scale * scale of x)`` for each cell, in the order of k."""
    group, _ = form_of(packed)
    u, scale, zero = unpack(packed)
    q, own = round_rows(x)
    cells = u.flatten(1).unflatten(1, (-1, CELL)).float()
    y = x.new_zeros(*x.shape[:-1], packed.shape[0], dtype=torch.float32)
    for cell in range(q.shape[-2]):
        at, row = cell * CELL // group, q[..., cell, :]
        whole = row @ cells[:, cell].T - zero[:, at] * row.sum(-1, keepdim=True)  # exact
        y = y + whole * (scale[:, at] * own[..., cell, None])
    return y
