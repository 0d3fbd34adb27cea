"""The largest values of a dimension that is split over the ranks; also in a trace, where the rank is data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.mappings import axis_of

__all__ = ["argmax", "topk"]


def argmax(
    tensor: Tensor, dim: int, gather_dim: int, keepdim: bool = False, process_group: object = None, **kernel: Any
) -> Tensor:
    """Return ``torch.argmax`` of the whole tensor, of which each rank has its piece of ``gather_dim``.

    All ranks get the same. Of equal values the first wins. ``kernel``: ``disable_argmax_kernel``, without effect here.
    """
    _, index = _largest(tensor, 1, dim, gather_dim, process_group, kernel, ("disable_argmax_kernel",))
    return index if keepdim else index.squeeze(dim)


def topk(
    tensor: Tensor, k: int, dim: int, gather_dim: int, process_group: object = None, **kernel: Any
) -> tuple[Tensor, Tensor]:
    """Return the values and indices of ``torch.topk`` of the whole tensor; as :func:`argmax`.

    ``kernel``: ``stages``, ``rank_id``, ``lnc`` and ``use_topk_rotated_kernel``, which have no effect here.
    """
    return _largest(tensor, k, dim, gather_dim, process_group, kernel, TOPK_KERNEL)


TOPK_KERNEL = ("stages", "rank_id", "lnc", "use_topk_rotated_kernel", "use_topk_custom_call_kernel")


def _largest(
    tensor: Tensor, k: int, dim: int, gather_dim: int, group: object, kernel: dict[str, Any], known: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    if unknown := kernel.keys() - set(known):
        raise TypeError(f"unexpected arguments: {', '.join(sorted(unknown))}")
    dim, gather_dim, context = dim % tensor.dim(), gather_dim % tensor.dim(), current_context()
    axis = axis_of(group, context)
    size = tensor.shape[dim]
    whole = size * (context.axis(axis).degree if dim == gather_dim else 1)
    if not 1 <= k <= whole:
        raise ParallelConfigError(f"topk: k={k} must be from 1 to {whole}, the size of dimension {dim}")
    found = list(_first_largest(tensor, min(k, size), dim))
    if dim == gather_dim:
        found[1] = found[1] + comm.axis_rank(context, axis, tensor.device) * size
    values, indices = (comm.all_gather(one.contiguous(), context, axis, gather_dim) for one in found)
    if whole == size:
        return values, indices
    values, best = _first_largest(values, k, dim)  # pieces are in the order of the indices, so the first still wins
    return values, indices.gather(dim, best)


def _first_largest(tensor: Tensor, k: int, dim: int) -> tuple[Tensor, Tensor]:
    if k > 1:
        values, indices = torch.topk(tensor, k, dim)
        return values, indices
    index = tensor.argmax(dim, keepdim=True)
    return tensor.gather(dim, index), index
