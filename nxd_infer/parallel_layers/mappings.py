"""Moves between parallel regions, each with its backward. The names are those of the reference (and of Apex).

A tensor is *replicated* (equal on every rank of the axis), *split* along a dimension (rank r holds the r-th piece), or
*partial* (the true value is the sum over the ranks). Each function is a conjugate pair of collectives:

======================================================  =================  ==================
function                                                forward            backward
======================================================  =================  ==================
``copy_to_tensor_model_parallel_region``                nothing            all-reduce
``reduce_from_tensor_model_parallel_region``            all-reduce         nothing
``scatter_to_tensor_model_parallel_region``             own piece          all-gather
``gather_from_tensor_model_parallel_region``            all-gather         own piece
``reduce_scatter_to_tensor_model_parallel_region...``   reduce-scatter     all-gather
``scatter_to_sequence_parallel_region``                 own piece          all-gather
``gather_from_sequence_parallel_region``                all-gather         reduce-scatter (1)
``reduce_scatter_to_sequence_parallel_region``          reduce-scatter     all-gather
``all_to_all``                                          all-to-all         all-to-all
======================================================  =================  ==================

(1) with ``to_model_parallel=False``: own piece, for a gathered value that every rank then uses in the same way.

All take ``process_group`` (None, an axis name, or a group of ``parallel_state``) and ``context`` (default: the current
one). The context is captured, so the backward uses the groups of the forward on any thread. During export only the
forward operator is recorded. At degree 1 every function returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nxd_infer import comm
from nxd_infer.context import AXES, EXPERT_AXES, ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.utils import indices_split_along_dim

__all__ = [
    "all_to_all", "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region", "gather_from_tensor_model_parallel_region_with_dim",
    "reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region",
    "reduce_scatter_to_tensor_model_parallel_region_with_dim", "scatter_input_channels_to_tensor_model_parallel_region",
    "scatter_to_process_group_spmd", "scatter_to_sequence_parallel_region", "scatter_to_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region_with_dim", "with_logical_gradient",
]  # fmt: skip

_IDENTITY, _REDUCE, _SHARD, _GATHER, _REDUCE_SCATTER = "identity", "all_reduce", "shard", "all_gather", "reduce_scatter"
_EXCHANGE = "all_to_all"


def reduction_dtype(x: Tensor, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which ``x`` is summed over ranks: ``reduce_dtype``, except that float64 stays float64."""
    if reduce_dtype is None or x.dtype == torch.float64 or not x.dtype.is_floating_point:
        return x.dtype
    return reduce_dtype


def _apply(kind: str, x: Tensor, context: ParallelContext, axis: str, dim: int, dtype: torch.dtype | None) -> Tensor:
    if kind == _IDENTITY:
        return x
    if kind == _SHARD:
        return comm.shard(x, context, axis, dim)
    if kind == _GATHER:
        return comm.all_gather(x.contiguous(), context, axis, dim)
    if kind == _EXCHANGE:
        return comm.all_to_all(x.contiguous(), context, axis)
    wide = x.to(reduction_dtype(x, dtype)).contiguous()
    if kind == _REDUCE:
        return comm.all_reduce(wide, context, axis).to(x.dtype)
    return comm.reduce_scatter(wide, context, axis, dim).to(x.dtype)


class _Move(torch.autograd.Function):
    """One collective in forward and its conjugate in backward, both in the given context."""

    @staticmethod
    def forward(ctx, x, forward_kind, backward_kind, context, axis, dim, dtype):
        ctx.arguments = (forward_kind, backward_kind, context, axis, dim, dtype)
        result = _apply(forward_kind, x, context, axis, dim, dtype)
        return result.view_as(result) if result is x else result

    @staticmethod
    def backward(ctx, *grads):
        forward_kind, backward_kind, *where = ctx.arguments
        if torch.is_grad_enabled() and grads[0].requires_grad:
            back = _Move.apply(grads[0], backward_kind, forward_kind, *where)
        else:
            back = _apply(backward_kind, grads[0], *where)
        return back, None, None, None, None, None, None


def _move(
    x: Tensor,
    forward_kind: str,
    backward_kind: str,
    process_group: object,
    context: ParallelContext | None,
    dim: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    context = current_context() if context is None else context
    axis = axis_of(process_group, context)
    if context.axis(axis).degree == 1:
        return x
    if torch.compiler.is_exporting() or not (torch.is_grad_enabled() and x.requires_grad):
        return _apply(forward_kind, x, context, axis, dim, dtype)
    return _Move.apply(x, forward_kind, backward_kind, context, axis, dim, dtype)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Elements:
    """Maps local elements of an axis to logical ones, if some are padding or occur more than once."""

    index: Tensor
    """int64 [local size]; ``size`` marks padding."""
    size: int
    repeated: bool
    """Whether an element of the axis occurs more than once, on any rank."""


class _LogicalGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, elements, dim, context, axis, dtype):
        ctx.arguments = (elements, dim, context, axis, dtype)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        elements, dim, context, axis, dtype = ctx.arguments
        grad = grads[0].movedim(dim, 0)
        index = elements.index.to(grad.device)
        if elements.repeated:
            # One extra row collects the gradients of padding.
            whole = grad.new_zeros((elements.size + 1, *grad.shape[1:]), dtype=reduction_dtype(grad, dtype))
            whole = whole.index_add(0, index, grad.to(whole.dtype))
            grad = comm.all_reduce(whole, context, axis).index_select(0, index).to(grad.dtype)
        padding = (index == elements.size).reshape(-1, *[1] * (grad.dim() - 1))
        return grad.masked_fill(padding, 0).movedim(0, dim), None, None, None, None, None


def with_logical_gradient(
    x: Tensor,
    elements: Elements | None,
    dim: int = 0,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """Return the weight ``x`` unchanged, with the gradient of the logical weight.

    ``elements`` describe dimension ``dim``. Copies of an element, on this and other ranks, get the sum of their
    gradients. Padding gets no gradient, so training does not change it.
    """
    if elements is None or torch.compiler.is_exporting() or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    context = current_context() if context is None else context
    axis = axis_of(process_group, context)
    return _LogicalGradient.apply(x, elements, dim, context, axis, reduce_dtype)  # pyright: ignore[reportReturnType]


def copy_to_tensor_model_parallel_region(
    x: Tensor,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Replicated -> replicated; the gradients of the ranks are summed (in ``reduce_dtype`` if given)."""
    return _move(x, _IDENTITY, _REDUCE, process_group, context, 0, reduce_dtype)


def reduce_from_tensor_model_parallel_region(
    x: Tensor,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> replicated: the sum over the ranks, in ``reduce_dtype`` if given, returned in x's dtype."""
    return _move(x, _REDUCE, _IDENTITY, process_group, context, 0, reduce_dtype)


def scatter_to_tensor_model_parallel_region(
    x: Tensor, process_group: object = None, *, context: ParallelContext | None = None
) -> Tensor:
    """Replicated -> split along the last dimension."""
    return _move(x, _SHARD, _GATHER, process_group, context, -1)


def scatter_to_tensor_model_parallel_region_with_dim(
    x: Tensor, partition_dim: int, process_group: object = None, *, context: ParallelContext | None = None
) -> Tensor:
    """Replicated -> split along ``partition_dim``."""
    return _move(x, _SHARD, _GATHER, process_group, context, partition_dim)


def scatter_input_channels_to_tensor_model_parallel_region(
    x: Tensor, process_group: object = None, *, context: ParallelContext | None = None
) -> Tensor:
    """Replicated [N, C, H, W] -> split along the channels (dimension 1)."""
    return _move(x, _SHARD, _GATHER, process_group, context, -3)


def gather_from_tensor_model_parallel_region(
    x: Tensor, process_group: object = None, *, context: ParallelContext | None = None
) -> Tensor:
    """Split along the last dimension -> replicated."""
    return _move(x, _GATHER, _SHARD, process_group, context, -1)


def gather_from_tensor_model_parallel_region_with_dim(
    x: Tensor, gather_dim: int, process_group: object = None, *, context: ParallelContext | None = None
) -> Tensor:
    """Split along ``gather_dim`` -> replicated."""
    return _move(x, _GATHER, _SHARD, process_group, context, gather_dim)


def reduce_scatter_to_tensor_model_parallel_region_with_dim(
    x: Tensor,
    partition_dim: int,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> split along ``partition_dim``."""
    return _move(x, _REDUCE_SCATTER, _GATHER, process_group, context, partition_dim, reduce_dtype)


def scatter_to_sequence_parallel_region(
    x: Tensor,
    sequence_dimension: int | None = 0,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Replicated -> split along the sequence."""
    return _move(x, _SHARD, _GATHER, process_group, context, sequence_dimension or 0)


def gather_from_sequence_parallel_region(
    x: Tensor,
    sequence_dimension: int | None = 0,
    to_model_parallel: bool = True,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Split along the sequence -> replicated.

    ``to_model_parallel=True``: each rank continues with its own weights, so its gradient is partial and the backward
    is a reduce-scatter. False: every rank uses the value in the same way, and the backward takes the own piece.
    """
    backward = _REDUCE_SCATTER if to_model_parallel else _SHARD
    return _move(x, _GATHER, backward, process_group, context, sequence_dimension or 0, reduce_dtype)


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor,
    sequence_dimension: int | None = 0,
    process_group: object = None,
    *,
    context: ParallelContext | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> split along the sequence."""
    return _move(x, _REDUCE_SCATTER, _GATHER, process_group, context, sequence_dimension or 0, reduce_dtype)


class _Divided(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, degree):
        ctx.degree = degree
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] / ctx.degree, None


def with_mean_gradient(x: Tensor, *, context: ParallelContext | None = None) -> Tensor:
    """Return the weight ``x`` of experts unchanged, with its gradient divided by the expert parallel degree.

    Its rank has the tokens of all of them, each weighted by the loss of its own rank, and the whole loss is their mean.
    """
    degree = (current_context() if context is None else context).ep.degree
    return x if degree == 1 else _Divided.apply(x, degree)  # pyright: ignore[reportReturnType]


def all_to_all(x: Tensor, process_group: object = "ep", *, context: ParallelContext | None = None) -> Tensor:
    """Send the i-th of equal pieces of x's first dimension to rank i; return theirs for this rank, in rank order."""
    return _move(x, _EXCHANGE, _EXCHANGE, process_group, context)


# --- plain moves, without a backward of their own: of ported code ------------------------------------------


def _gather_along_dim(x: Tensor, partition_dim: int, process_group: object = None, tile_cc: bool = False) -> Tensor:
    """Concatenate the ranks' pieces. ``tile_cc``: no effect here, as in the others."""
    return _plainly(_GATHER, x, partition_dim, process_group)


def _split_along_dim(x: Tensor, partition_dim: int, process_group: object = None) -> Tensor:
    return _plainly(_SHARD, x, partition_dim, process_group)


def _along(kind: str, dim: int) -> Callable[..., Tensor]:
    return lambda x, process_group=None: _plainly(kind, x, dim, process_group)


_gather_along_first_dim, _gather_along_last_dim = _along(_GATHER, 0), _along(_GATHER, -1)
_split_along_first_dim, _split_along_last_dim = _along(_SHARD, 0), _along(_SHARD, -1)
_reduce_scatter_along_first_dim = _along(_REDUCE_SCATTER, 0)
_reduce_scatter_along_last_dim = _along(_REDUCE_SCATTER, -1)


def _reduce(x: Tensor, computation: str = "sum", process_group: object = None, tile_cc: bool = False) -> Tensor:
    """Reduce with ``sum``, ``max`` or ``min``: torch_xla's ``REDUCE_SUM``, ``REDUCE_MAX`` and ``REDUCE_MIN``."""
    context = current_context()
    return comm.all_reduce(x.contiguous(), context, axis_of(process_group, context), computation)


def _reduce_scatter_along_dim(
    x: Tensor, partition_dim: int, computation: str = "sum", process_group: object = None, tile_cc: bool = False
) -> Tensor:
    """Reduce with ``computation``, as :func:`_reduce`, and keep this rank's piece."""
    if computation == "sum":
        return _plainly(_REDUCE_SCATTER, x, partition_dim, process_group)
    return _plainly(_SHARD, _reduce(x, computation, process_group), partition_dim, process_group)


def _plainly(kind: str, x: Tensor, dim: int, process_group: object) -> Tensor:
    context = current_context()
    axis = axis_of(process_group, context)
    return x if context.axis(axis).degree == 1 else _apply(kind, x, context, axis, dim, None)


def scatter_to_process_group_spmd(
    x: Tensor, partition_dim: int, rank: int | Tensor, process_group: object = None
) -> Tensor:
    """Replicated -> the piece of ``rank`` (a number or an int tensor [1], which may be data in a graph)."""
    context = current_context()
    degree = context.axis(axis_of(process_group, context)).degree
    return x.index_select(partition_dim, indices_split_along_dim(x, partition_dim, rank, degree))


def axis_of(process_group: object, context: ParallelContext) -> str:
    """Return the axis of a process group: tp for ``None``, an axis name itself, or the axis with the group's ranks.

    Layers keep an axis name: a module that holds a group cannot be copied, and its name differs from rank to rank.

    A group is a torch.distributed group, a list of ranks, or a list of such lists, of which the one with this rank is
    used (``get_tensor_model_parallel_group(as_list=True)``).

    Raises ParallelConfigError for an unknown axis name and for a group that is not one of this rank's.
    """
    if process_group is None:
        return "tp"
    if isinstance(process_group, str):
        if process_group in (*AXES, *EXPERT_AXES):
            return process_group
        raise ParallelConfigError(f"there is no parallel axis {process_group!r}; the axes are {', '.join(AXES)}")
    ranks = _ranks_of(process_group, context.rank)
    for axis in ("tp", "cp", "dp", "pp", "ep", "edp"):
        if context.axis(axis).ranks == ranks:
            return axis
    raise ParallelConfigError(
        f"the process group {process_group!r} with ranks {list(ranks)} is not a parallel group of rank {context.rank}; "
        f"pass None or one of the axis names {', '.join(AXES)}"
    )


def _ranks_of(process_group: object, rank: int) -> tuple[int, ...]:
    """Return the global ranks of a group; of several groups, those of the group with ``rank``."""
    import torch.distributed as dist

    if isinstance(process_group, list | tuple):
        several = [group for group in process_group if isinstance(group, list | tuple)]
        return tuple(next((group for group in several if rank in group), () if several else process_group))

    if dist.is_available() and isinstance(process_group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(process_group))
    ranks = getattr(process_group, "ranks", None)
    if ranks is not None:
        return tuple(ranks)
    raise ParallelConfigError(
        f"a process group must be None, an axis name or a group of parallel_state, got {type(process_group).__name__}"
    )
