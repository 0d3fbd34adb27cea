"""Linear layers with a weight that is re-blocked for sequential reading, which is what CPU decoding does.

A packed weight has the shape ``[N, K]``, dtype and bytes of the plain one, in another order: blocks of 32 rows, with
``k`` slowest inside a block (bfloat16: pairs of ``k`` adjacent). The last block has the remaining rows, and an odd K
ends in one row of single values, so every shape can be packed, and unpacks to the same bits.

In eight bits, a decode step reads half the bytes: a weight becomes ``q * scale``, ``scale[n] = max|w[n]| / 127`` in
float32, and ``q`` in -127 .. 127, rounded to nearest (ties to even). Activations keep their dtype. The packed tensor is
int8 [N, K + 4]: in each block the ``[K][32]`` numbers, followed by its scales as float32. Weights in four bits, which
round activations too, are uint8 [N, groups, bytes] (:mod:`nxd_infer.ops.int4`).

A weight [E, N, K] of experts is packed as E of these, one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.ops import int4
from nxd_infer.ops.composite import composite

COLUMNS = 32
DTYPES = frozenset({torch.float32, torch.bfloat16})
"""Dtypes with a packed form."""
SCALE_BYTES = 4
"""Bytes of a row's scale in eight bits, after its K values."""
LARGEST = 127


# --- operators ----------------------------------------------------------------------------------------


def _linears_fake(x: Tensor, layers: Sequence[Tensor], biased: bool) -> list[Tensor]:
    return [x.new_empty([*x.shape[:-1], weight.shape[0]]) for weight, _ in _split(layers, biased)]


@composite("packed_linears(Tensor x, Tensor[] layers, bool biased) -> Tensor[]", _linears_fake)
def packed_linears(x: Tensor, layers: Sequence[Tensor], biased: bool = False) -> list[Tensor]:
    """Compute ``F.linear(x, weight, bias)`` of one ``x`` for each packed ``weight`` of N rows, all of one form; x
    [..., K] and the biases, float32 or bfloat16 -> [..., N] each.

    The native operator adds in float32, in the order of ``k``, and rounds once. A row's result is bit-equal alone, in
    any batch and with any number of threads: it does not depend on other rows. Integers below 128 are exact in
    bfloat16, so it adds ``q`` of eight bits like a plain weight, and multiplies the sum by the scale. Products of four
    bits have the bits of this reference, with any instructions.

    Threads start and synchronise once for all weights, which is the main cost of small matrices.

    Args:
        layers: the weights, followed by a bias for each if ``biased``.
    """
    results = []
    for weight, bias in _split(layers, biased):
        if weight.dtype not in (torch.int8, torch.uint8):
            results.append(F.linear(x, unpack(weight), bias))
            continue
        if weight.dtype == torch.uint8:
            y = int4.linear(x, weight)
        else:
            q, scale = unpack_int8(weight)
            y = F.linear(x.float(), q.float()) * scale
        results.append((y if bias is None else y + bias.float()).to(x.dtype))
    return results


def _split(layers: Sequence[Tensor], biased: bool) -> list[tuple[Tensor, Tensor | None]]:
    """Return the weights, each with its bias or None."""
    count = len(layers) // 2 if biased else len(layers)
    return list(zip(layers[:count], layers[count:] or [None] * count, strict=True))


def _embedding_fake(weight: Tensor, ids: Tensor, bfloat16: bool) -> Tensor:
    if weight.dtype != torch.int8:
        return weight.new_empty([*ids.shape, weight.shape[1]])
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    return weight.new_empty([*ids.shape, weight.shape[1] - SCALE_BYTES], dtype=dtype)


@composite("packed_embedding(Tensor weight, Tensor ids, bool bfloat16) -> Tensor", _embedding_fake)
def packed_embedding(weight: Tensor, ids: Tensor, bfloat16: bool = False) -> Tensor:
    """Compute ``F.embedding(ids, weight)`` for a packed table [N, K]; ids of any shape -> [*ids.shape, K].

    Rows of a table in eight bits are rounded to bfloat16, or in float32. An id outside ``0 .. N-1`` is an error, as for
    F.embedding.
    """
    if weight.dtype != torch.int8:
        return F.embedding(ids, unpack(weight))
    q, scale = unpack_int8(weight)
    rows = F.embedding(ids, q) * F.embedding(ids, scale[:, None])
    return rows.to(torch.bfloat16 if bfloat16 else torch.float32)


# --- packing ------------------------------------------------------------------------------------------


def packable(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], stored: bool = False) -> bool:
    """Return whether a tensor can be packed: contiguous, non-empty float32 or bfloat16 matrices, one or several."""
    rows = [] if len(shape) == 2 else [math.prod(shape[-2:])]
    if dtype not in DTYPES and not (stored and dtype == torch.int8):
        return False
    return len(shape) in (2, 3) and min(shape) > 0 and list(stride) == [*rows, shape[-1], 1]


def pack(weight: Tensor, out: Tensor | None = None, library: Any = None) -> Tensor:
    """Pack ``weight`` [N, K] or [E, N, K], into ``out`` if given (same shape and dtype, contiguous).

    With a ``library`` (``native.NativeLibrary``) this runs at memory speed; without one it is plain PyTorch.
    """
    out = torch.empty_like(weight, memory_format=torch.contiguous_format) if out is None else out
    if weight.dim() == 3:
        for one, packed in zip(weight, out, strict=True):
            pack(one, packed, library)
        return out
    if library is not None:
        library.op("pack")(out, weight)
        return out
    flat = out.view(-1)
    K = weight.shape[1]
    for row, stop, whole, group in _blocks(weight):
        w = stop - row
        block = flat[row * K : stop * K]
        block[: w * whole].view(-1, w, group).copy_(weight[row:stop, :whole].view(w, -1, group).transpose(0, 1))
        block[w * whole :].copy_(weight[row:stop, whole:].reshape(-1))
    return out


def unpack(packed: Tensor) -> Tensor:
    """Return the plain weight of a packed one; exact."""
    out = torch.empty_like(packed)
    flat = packed.reshape(-1)
    K = packed.shape[1]
    for row, stop, whole, group in _blocks(packed):
        w = stop - row
        block = flat[row * K : stop * K]
        out[row:stop, :whole] = block[: w * whole].view(-1, w, group).transpose(0, 1).reshape(w, whole)
        out[row:stop, whole:] = block[w * whole :].view(w, -1)
    return out


def _blocks(weight: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each block: its first row, its end, the number of k values in groups, and the group size."""
    N, K = weight.shape
    group = 2 if weight.dtype == torch.bfloat16 else 1
    for row in range(0, N, COLUMNS):
        yield row, min(N, row + COLUMNS), K - K % group, group


def packed_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of the tensor in eight bits for a weight of ``shape`` [..., K]."""
    return [*shape[:-1], shape[-1] + SCALE_BYTES]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(q, scale)`` of a weight [..., K]: int8 [..., K] and float32 [...]. A zero row has scale 1, and so have
    numbers that are int8 already."""
    if weight.dtype == torch.int8:
        return weight, torch.ones(weight.shape[:-1])
    wide = weight.float()
    scale = wide.abs().amax(-1) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    return (wide / scale[..., None]).clamp(-LARGEST, LARGEST).round().to(torch.int8), scale


def pack_int8(weight: Tensor, out: Tensor | None = None, library: Any = None) -> Tensor:
    """Quantize and pack ``weight`` [..., N, K] as int8 [..., N, K + 4], into ``out`` if given.

    With a ``library`` (``native.NativeLibrary``) this runs at memory speed; without one it is plain PyTorch, bit-equal.
    """
    out = torch.empty(packed_shape(weight.shape), dtype=torch.int8) if out is None else out
    if weight.dim() == 3:
        for one, packed in zip(weight, out, strict=True):
            pack_int8(one, packed, library)
        return out
    if library is not None and weight.dtype != torch.int8:
        library.op("pack_int8")(out, weight)
        return out
    N, K = weight.shape
    flat = out.view(-1)
    for row in range(0, N, COLUMNS):
        q, scale = quantize(weight[row : row + COLUMNS])
        block = flat[row * (K + SCALE_BYTES) :][: q.shape[0] * (K + SCALE_BYTES)]
        block[: q.numel()] = q.T.reshape(-1)
        block[q.numel() :] = scale.view(torch.int8)
    return out


def unpack_int8(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(q, scale)`` of a packed weight; exact."""
    N, row_bytes = packed.shape
    whole = N // COLUMNS * COLUMNS
    parts = [(packed[:whole], COLUMNS)] if whole else []
    parts += [(packed[whole:], N - whole)] if whole < N else []
    numbers, scales = [], []
    for part, width in parts:
        K = row_bytes - SCALE_BYTES
        blocks = part.reshape(-1, width * row_bytes)
        numbers.append(blocks[:, : width * K].reshape(-1, K, width).transpose(1, 2).reshape(-1, K))
        bits = blocks[:, width * K :].clone(memory_format=torch.contiguous_format)  # aligned for float32
        scales.append(bits.view(torch.float32).reshape(-1))
    return torch.cat(numbers), torch.cat(scales)
