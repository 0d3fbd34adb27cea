"""The largest values of a dimension that is split over the ranks; also in a trace, where the rank is data."""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.mappings import axis_of
from nxd_infer.util.also_called import also_called

__all__ = ["argmax", "topk"]


@also_called(ignored="disable_argmax_kernel")
def argmax(tensor: Tensor, dim: int, gather_dim: int, keepdim: bool = False, process_group: object = None) -> Tensor:
    """Return ``torch.argmax`` of the whole tensor, of which each rank has its piece of ``gather_dim``.

    All ranks get the same. Of equal values the first wins.
    """
    index = topk(tensor, 1, dim, gather_dim, process_group)[1]
    return index if keepdim else index.squeeze(dim)


@also_called(ignored="lnc rank_id stages use_topk_custom_call_kernel use_topk_rotated_kernel")
def topk(tensor: Tensor, k: int, dim: int, gather_dim: int, process_group: object = None) -> tuple[Tensor, Tensor]:
    """Return the values and indices of ``torch.topk`` of the whole tensor; as :func:`argmax`."""
    dim, gather_dim, context = dim % tensor.dim(), gather_dim % tensor.dim(), current_context()
    axis, size = axis_of(process_group, context), tensor.shape[dim]
    whole = size * (context.axis(axis).degree if dim == gather_dim else 1)
    if not 1 <= k <= whole:
        raise ParallelConfigError(f"topk: k={k} must be from 1 to {whole}, the size of dimension {dim}")
    values, indices = _first_largest(tensor, min(k, size), dim)
    if dim == gather_dim:
        indices = indices + comm.axis_rank(context, axis, tensor.device) * size
    values, indices = (comm.all_gather(one.contiguous(), context, axis, gather_dim) for one in (values, indices))
    if whole == size:
        return values, indices
    values, best = _first_largest(values, k, dim)  # pieces are in the order of the indices, so the first still wins
    return values, indices.gather(dim, best)


def _first_largest(tensor: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
    if k > 1:
        return tuple(torch.topk(tensor, k, dim))  # pyright: ignore[reportReturnType]
    index = tensor.argmax(dim, keepdim=True)
    return tensor.gather(dim, index), index
