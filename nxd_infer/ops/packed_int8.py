"""Linear layers with int8 weights: a decode step reads half the bytes.

A weight [N, K] becomes ``q * scale``: ``scale[n] = max|w[n]| / 127`` in float32, and ``q`` in -127 .. 127, rounded to
nearest (ties to even). Activations keep their dtype. The packed tensor is int8 [N, K + 4]: blocks of 32 rows as in
:mod:`nxd_infer.ops.packed`, each with ``[K][32]`` numbers, ``k`` slowest, followed by its scales as float32. The last
block has the remaining rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.ops.packed import COLUMNS, packed_linear_fake, packed_linears_fake, split_layers

SCALE_BYTES = 4
"""Bytes of a row's scale, after its K values."""
LARGEST = 127

_LIBRARY = torch.library.Library("nxd", "FRAGMENT")
_LIBRARY.define("packed_int8_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define("packed_int8_linears(Tensor x, Tensor[] layers, bool biased) -> Tensor[]")
_LIBRARY.define("packed_int8_embedding(Tensor weight, Tensor ids, bool bfloat16) -> Tensor")


def packed_int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ q.T * scale + bias`` for a packed ``weight``; x [..., K] -> [..., N], both float32 or bfloat16.

    Sums, scale and bias are float32, and the result is rounded once. Integers below 128 are exact in bfloat16, so the
    native operator adds like ``packed_linear`` with a weight ``q``: a row's result depends on no other row.
    """
    return torch.ops.nxd.packed_int8_linear(x, weight, bias)


def packed_int8_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """:func:`packed_int8_linear` of one ``x`` for each weight, bit-equal; no ``biases``, or one per weight."""
    return torch.ops.nxd.packed_int8_linears(x, [*weights, *biases], bool(biases))


def packed_int8_embedding(weight: Tensor, ids: Tensor, bfloat16: bool) -> Tensor:
    """Look up rows of ``q * scale``, rounded to bfloat16 or in float32; ids of any shape -> [*ids.shape, K].

    An id outside ``0 .. N-1`` is an error, as for F.embedding.
    """
    return torch.ops.nxd.packed_int8_embedding(weight, ids, bfloat16)


def packed_shape(shape: Sequence[int]) -> list[int]:
    """Return the shape of the packed tensor for a weight of ``shape`` [N, K]."""
    return [shape[0], shape[1] + SCALE_BYTES]


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(q, scale)`` of a weight [N, K]: int8 [N, K] and float32 [N]. A zero row has scale 1."""
    wide = weight.float()
    scale = wide.abs().amax(1) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    return (wide / scale[:, None]).clamp(-LARGEST, LARGEST).round().to(torch.int8), scale


def pack_int8(weight: Tensor, out: Tensor | None = None, library: Any = None) -> Tensor:
    """Quantize and pack ``weight`` [N, K] as int8 [N, K + 4], into ``out`` if given.

    With a ``library`` (``native.NativeLibrary``) this runs at memory speed; without one it is plain PyTorch, bit-equal.
    """
    out = torch.empty(packed_shape(weight.shape), dtype=torch.int8) if out is None else out
    if library is not None:
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


def packed_int8_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`packed_int8_linear` in plain PyTorch."""
    q, scale = unpack_int8(weight)
    y = F.linear(x.float(), q.float()) * scale
    return (y if bias is None else y + bias.float()).to(x.dtype)


def packed_int8_linears_reference(x: Tensor, layers: Sequence[Tensor], biased: bool) -> list[Tensor]:
    """:func:`packed_int8_linears` in plain PyTorch."""
    return [packed_int8_linear_reference(x, *layer) for layer in zip(*split_layers(layers, biased), strict=True)]


def packed_int8_embedding_reference(weight: Tensor, ids: Tensor, bfloat16: bool) -> Tensor:
    """:func:`packed_int8_embedding` in plain PyTorch."""
    q, scale = unpack_int8(weight)
    rows = F.embedding(ids, q) * F.embedding(ids, scale[:, None])
    return rows.to(torch.bfloat16 if bfloat16 else torch.float32)


def packed_int8_embedding_fake(weight: Tensor, ids: Tensor, bfloat16: bool) -> Tensor:
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    return weight.new_empty([*ids.shape, weight.shape[1] - SCALE_BYTES], dtype=dtype)


for _name, _reference, _fake in (
    ("packed_int8_linear", packed_int8_linear_reference, packed_linear_fake),
    ("packed_int8_linears", packed_int8_linears_reference, packed_linears_fake),
    ("packed_int8_embedding", packed_int8_embedding_reference, packed_int8_embedding_fake),
):
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nxd::{_name}", _fake, lib=_LIBRARY)
