"""Linear layers with a weight that is re-blocked for sequential reading, which is what CPU decoding does.

A packed weight has the shape ``[N, K]``, dtype and bytes of the plain one, in another order: blocks of 32 rows, with
``k`` slowest inside a block (bfloat16: pairs of ``k`` adjacent). The last block has the remaining rows, and an odd K
ends in one row of single values, so every shape can be packed, and unpacks to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 32
DTYPES = frozenset({torch.float32, torch.bfloat16})
"""Dtypes with a packed form."""

_LIBRARY = torch.library.Library("nxd", "FRAGMENT")
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.define("packed_linears(Tensor x, Tensor[] layers, bool biased) -> Tensor[]")
_LIBRARY.define("packed_embedding(Tensor weight, Tensor ids) -> Tensor")


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear(x, unpack(weight), bias)`` for a packed ``weight`` [N, K]; x [..., K] -> [..., N], same dtype.

    The native operator adds in float32, in the order of ``k``, and rounds once. A row's result is bit-equal alone, in
    any batch and with any number of threads: it does not depend on other rows.
    """
    return torch.ops.nxd.packed_linear(x, weight, bias)


def packed_linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> list[Tensor]:
    """:func:`packed_linear` of one ``x`` for each weight, bit-equal; ``biases`` is empty or has one per weight.

    Threads start and synchronise once for all weights, which is the main cost of small matrices. The operator takes the
    weights, followed by their biases if ``biased``.
    """
    return torch.ops.nxd.packed_linears(x, [*weights, *biases], bool(biases))


def packed_embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Compute ``F.embedding(ids, unpack(weight))`` for a packed table [N, K]; ids of any shape -> [*ids.shape, K].

    An id outside ``0 .. N-1`` is an error, as for F.embedding.
    """
    return torch.ops.nxd.packed_embedding(weight, ids)


def packable(dtype: torch.dtype, shape: tuple[int, ...] | list[int], stride: tuple[int, ...] | list[int]) -> bool:
    """Return whether a tensor can be packed: a contiguous, non-empty float32 or bfloat16 matrix."""
    return dtype in DTYPES and len(shape) == 2 and min(shape) > 0 and list(stride) == [shape[1], 1]


def pack(weight: Tensor, out: Tensor | None = None, library: Any = None) -> Tensor:
    """Pack ``weight`` [N, K], into ``out`` if given (same shape and dtype, contiguous).

    With a ``library`` (``native.NativeLibrary``) this runs at memory speed; without one it is plain PyTorch.
    """
    out = torch.empty_like(weight, memory_format=torch.contiguous_format) if out is None else out
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


def unpack(packed: Tensor, library: Any = None) -> Tensor:
    """Return the plain weight of a packed one; exact."""
    if library is not None:
        return library.op("unpack")(packed)
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


def packed_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`packed_linear` in plain PyTorch."""
    return F.linear(x, unpack(weight), bias)


def packed_linears_reference(x: Tensor, layers: Sequence[Tensor], biased: bool) -> list[Tensor]:
    """:func:`packed_linears` in plain PyTorch."""
    weights, biases = split_layers(layers, biased)
    return [packed_linear_reference(x, *layer) for layer in zip(weights, biases, strict=True)]


def split_layers(layers: Sequence[Tensor], biased: bool) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the weights, and a bias or None for each."""
    count = len(layers) // 2 if biased else len(layers)
    return layers[:count], layers[count:] or [None] * count


def packed_embedding_reference(weight: Tensor, ids: Tensor) -> Tensor:
    """:func:`packed_embedding` in plain PyTorch."""
    return F.embedding(ids, unpack(weight))


def packed_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty([*x.shape[:-1], weight.shape[0]])


def packed_linears_fake(x: Tensor, layers: Sequence[Tensor], biased: bool) -> list[Tensor]:
    return [packed_linear_fake(x, weight) for weight in split_layers(layers, biased)[0]]


def packed_embedding_fake(weight: Tensor, ids: Tensor) -> Tensor:
    return weight.new_empty([*ids.shape, weight.shape[1]])


for _name, _reference, _fake in (
    ("packed_linear", packed_linear_reference, packed_linear_fake),
    ("packed_linears", packed_linears_reference, packed_linears_fake),
    ("packed_embedding", packed_embedding_reference, packed_embedding_fake),
):
    _LIBRARY.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nxd::{_name}", _fake, lib=_LIBRARY)
