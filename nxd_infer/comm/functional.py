"""The collectives that layers call: a no-op at degree 1, an operator during export, else the context's transport."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer.comm import ops as _ops
from nxd_infer.comm.protocol import collectives_of
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError


def only_shapes(x: Tensor) -> bool:
    """Return whether nothing is computed: during export, and on the meta device."""
    return torch.compiler.is_compiling() or x.is_meta


def all_reduce(x: Tensor, context: ParallelContext, axis: str = "tp", op: str = "sum") -> Tensor:
    """Reduce with ``op`` (sum, max, min) over the axis; same shape as ``x``."""
    degree = context.axis(axis).degree
    if degree == 1:
        return x
    if only_shapes(x):
        return torch.ops.nxd.all_reduce(x, axis, op, degree)
    return collectives_of(context).all_reduce(x, axis, op)


def all_gather(x: Tensor, context: ParallelContext, axis: str = "tp", dim: int = -1) -> Tensor:
    """Concatenate along ``dim`` in rank order: that dimension grows by the degree."""
    degree = context.axis(axis).degree
    if degree == 1:
        return x
    dim = _ops.check_dim(x, dim, "all_gather")
    if only_shapes(x):
        return torch.ops.nxd.all_gather(x, axis, dim, degree)
    return collectives_of(context).all_gather(x, axis, dim)


def reduce_scatter(x: Tensor, context: ParallelContext, axis: str = "tp", dim: int = 0) -> Tensor:
    """Sum over the axis and keep this rank's piece along ``dim``: that dimension shrinks by the degree."""
    degree = context.axis(axis).degree
    if degree == 1:
        return x
    dim = _ops.check_dim(x, dim, "reduce_scatter")
    _ops.check_divisible(x, dim, degree, "reduce_scatter")
    if only_shapes(x):
        return torch.ops.nxd.reduce_scatter(x, axis, dim, degree)
    return collectives_of(context).reduce_scatter(x, axis, dim)


def broadcast(x: Tensor, context: ParallelContext, axis: str = "tp", src: int = 0) -> Tensor:
    """Return the tensor of the ``src``-th rank of the axis."""
    degree = context.axis(axis).degree
    if degree == 1:
        return x
    if not 0 <= src < degree:
        raise CollectiveError(f"broadcast: source rank {src} is not one of the {degree} ranks of axis {axis!r}")
    if only_shapes(x):
        return torch.ops.nxd.broadcast(x, axis, src, degree)
    return collectives_of(context).broadcast(x, axis, src)


def all_to_all(x: Tensor, context: ParallelContext, axis: str) -> Tensor:
    """Send the i-th of equal pieces of the first dimension to rank i; return theirs for this rank, in rank order.

    Raises CollectiveError in a graph, where there is no such operator.
    """
    degree = context.axis(axis).degree
    if degree == 1:
        return x
    _ops.check_divisible(x, 0, degree, "all_to_all")
    if x.is_meta:
        return torch.empty_like(x)
    if torch.compiler.is_compiling():
        raise CollectiveError(f"all_to_all over axis {axis!r} cannot be part of a graph; build the model without it")
    return collectives_of(context).all_to_all(x, axis)


def shard(x: Tensor, context: ParallelContext, axis: str = "tp", dim: int = -1) -> Tensor:
    """Copy this rank's equal piece along ``dim``. No communication; the rank stays data in an exported graph."""
    here = context.axis(axis)
    if here.degree == 1:
        return x
    dim = _ops.check_dim(x, dim, "shard")
    _ops.check_divisible(x, dim, here.degree, "shard")
    if only_shapes(x):
        return torch.ops.nxd.shard(x, axis, dim, here.degree)
    return _ops.own_piece(x, dim, here)


def axis_rank(context: ParallelContext, axis: str = "tp", device: torch.device | None = None) -> Tensor:
    """Return this rank's index on the axis as a 0-d int64 tensor; data, not a constant, in an exported graph."""
    here = context.axis(axis)
    if here.degree > 1 and torch.compiler.is_compiling():
        return torch.ops.nxd.axis_rank(axis)
    return torch.tensor(here.rank, dtype=torch.int64, device=device)


def barrier(context: ParallelContext, axis: str = "tp") -> None:
    if context.axis(axis).degree > 1:
        collectives_of(context).barrier(axis)
