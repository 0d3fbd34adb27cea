"""Gradients over ranks: the elements that a rank counts, the global norm, clipping, and sums over ranks.

A parameter that every tensor-parallel rank holds counts once; a split parameter counts piece by piece; of replicated
elements (key/value heads) only the first owner's counts; padding does not count; a tied parameter is one parameter. So
the norm is that of the whole model at any degrees.

Source: API guide, "Gradient Clipping".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.comm.launched import require_no_lonely_rank
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout.merge import owned_blocks
from nxd_infer.layout.params import ParamLayout
from nxd_infer.util.also_called import also_called
from nxd_infer.util.devices import HOST, transport_device

__all__ = [
    "allreduce_sequence_parallel_gradients", "bucket_allreduce_gradients", "clip_grad_norm", "counted_spans",
    "get_grad_norm", "param_is_not_shared",
]  # fmt: skip

Spans = tuple[tuple[int, int], ...]
"""Ranges of the elements of a flattened tensor."""

HALF = (torch.bfloat16, torch.float16)

AT_ONCE = 1 << 16
"""Most elements that a CPU adds up one after the other: in float32 PyTorch's norm of 2 million is wrong by 3e-5, and of
16 million by 7e-4."""


@dataclass(frozen=True)
class Share:
    """A gradient and the ranges of it that this rank counts."""

    grad: Tensor
    spans: Spans
    over: str | None = None
    """The axis whose ranks hold different elements, so that all of theirs count: dp with ZeRO-1, ep for experts."""


# --- the elements that a rank counts ----------------------------------------------------------------------


def split_over_ranks(param: Tensor) -> bool:
    """Return whether the tensor-parallel ranks hold different elements of ``param``."""
    return bool(getattr(param, "tensor_model_parallel", False)) and getattr(param, "num_partitions", 2) > 1


def is_expert_parallel(param: Tensor) -> bool:
    """Return whether the expert parallel ranks hold different experts in ``param``."""
    return bool(getattr(param, "expert_model_parallel", False))


def counted_spans(param: Tensor, context: ParallelContext | None = None) -> Spans:
    """Return the ranges of the flattened ``param`` that this rank counts in a norm over all ranks."""
    tp = (current_context() if context is None else context).tp
    if getattr(param, "nxd_spans", None) is not None:  # a range of a flat bucket; see nxd_infer.optimizer
        return param.nxd_spans  # pyright: ignore[reportAttributeAccessIssue]
    whole: Spans = ((0, param.numel()),) if param.numel() else ()
    layout: ParamLayout | None = getattr(param, "nxd_layout", None)
    if layout is None or not any(plan.duplicated(tp.degree) for plan in layout.axes):
        return whole if tp.rank == 0 or split_over_ranks(param) else ()
    owned = torch.zeros(param.shape, dtype=torch.bool)
    for block in owned_blocks(layout, tp.degree, tp.rank):
        owned[block.local_slices] = True
    outside = torch.zeros(1, dtype=torch.int8)
    edges = torch.diff(owned.flatten().to(torch.int8), prepend=outside, append=outside)
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, stops, strict=True))


def cut_spans(spans: Spans, start: int, stop: int) -> Spans:
    """Return the part of ``spans`` inside ``start..stop``, relative to ``start``."""
    cut = ((max(a, start) - start, min(b, stop) - start) for a, b in spans)
    return tuple((a, b) for a, b in cut if a < b)


# --- norms ------------------------------------------------------------------------------------------------


def norm_order(norm_type: float | int | str) -> float:
    """Return the ``p`` of a norm; ``"inf"`` is infinity. Raises ParallelConfigError unless it is positive."""
    try:
        p = float(norm_type)
    except (TypeError, ValueError):
        p = math.nan
    if not p > 0:
        raise ParallelConfigError(f"norm_type must be a positive number or 'inf', got {norm_type!r}")
    return p


def total_norm(shares: Sequence[Share], p: float, context: ParallelContext, *, zero1: bool = False) -> Tensor:
    """Return the p-norm of all counted elements over all ranks, a 0-d float32 or float64 tensor.

    Every tensor-, pipeline- and expert-parallel rank must call it, with ``zero1`` also every data-parallel rank. If a
    sum overflows float32, it is computed again in float64, so the norm is non-finite only if a gradient is.
    """
    norm = _combined_norm(shares, p, context, zero1, wide=False)
    if not torch.isfinite(norm):
        norm = _combined_norm(shares, p, context, zero1, wide=True)
    return norm


def _combined_norm(shares: Sequence[Share], p: float, context: ParallelContext, zero1: bool, wide: bool) -> Tensor:
    norm = _local_norm([share for share in shares if share.over is None], p, wide)
    for axis in _split_axes(context, zero1):
        pieces = _over_ranks(_local_norm([share for share in shares if share.over == axis], p, wide), p, context, axis)
        norm = torch.linalg.vector_norm(torch.stack([norm.to(pieces), pieces]), p)
    return _over_ranks(_over_ranks(norm, p, context, "tp"), p, context, "pp")


def _split_axes(context: ParallelContext, zero1: bool) -> tuple[str, ...]:
    """Return the axes that shares may be over: with ZeRO-1 all data-parallel ranks differ, in experts as well."""
    return ("dp",) if zero1 else ("ep",) if context.ep.degree > 1 else ()


def _local_norm(shares: Sequence[Share], p: float, wide: bool) -> Tensor:
    """Return this rank's norm, in float64 if ``wide`` or for float64 gradients, else in float32."""
    parts = [piece for share in shares for part in _counted(share) for piece in pieces_of(part)]
    if not parts:
        kind = torch.float64 if wide else torch.float32
        return torch.zeros((), dtype=kind, device=shares[0].grad.device if shares else transport_device())
    norms: list[Tensor] = []
    if wide:
        norms = [torch.linalg.vector_norm(part, p, dtype=torch.float64) for part in parts]
    else:
        norms = [torch.linalg.vector_norm(part, p, dtype=torch.float32) for part in parts if part.dtype in HALF]
        for group in _by_type(part for part in parts if part.dtype not in HALF):
            norms += torch._foreach_norm(group, p)  # pyright: ignore[reportPrivateImportUsage]
    widest = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    return torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device, widest) for norm in norms]), p)


def pieces_of(values: Tensor) -> Sequence[Tensor]:
    """Return parts of a tensor whose norms, and the norm of these, are exact enough; on other devices it is alone."""
    if values.numel() <= AT_ONCE or values.device.type != HOST.type:
        return (values,)
    return values.reshape(-1).split(AT_ONCE)


def _counted(share: Share) -> Iterator[Tensor]:
    grad = _values(share.grad)
    if share.grad.is_sparse or share.spans == ((0, grad.numel()),):
        if share.spans:
            yield grad
        return
    flat = grad.reshape(-1)
    for start, stop in share.spans:
        yield flat[start:stop]


def _values(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def _over_ranks(norm: Tensor, p: float, context: ParallelContext, axis: str) -> Tensor:
    """Return the norm of the ranks' norms in their widest dtype, bit-equal on all ranks; at degree 1 ``norm``."""
    if context.axis(axis).degree == 1:
        return norm
    wide = norm.double()
    is_wide = torch.full_like(wide, norm.dtype == torch.float64)  # a rank that counts nothing cannot tell
    # A maximum over ranks may lose a NaN, so a NaN flag is reduced with it.
    top, missing, is_wide = comm.all_reduce(
        torch.stack([wide.masked_fill(wide.isnan(), 0.0), wide.isnan(), is_wide]), context, axis, "max"
    )
    dtype = torch.float64 if is_wide else torch.float32
    if math.isinf(p):
        return top.masked_fill(missing > 0, math.nan).to(dtype)
    # Divide by the largest norm, because its p-th power may overflow float64.
    scale = torch.where(torch.isfinite(top) & (top > 0), top, torch.ones_like(top))
    total = comm.all_reduce((wide / scale).pow(p), context, axis)
    return (scale * total.pow(1 / p)).to(dtype)


def _by_type(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def clip_with_norm(grads: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale ``grads`` in place by ``min(1, max_norm / (norm + 1e-6))``, as ``torch.nn.utils`` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in _by_type(grads):
        if group[0].is_sparse:
            for grad in group:
                grad.mul_(factor)
        else:
            torch._foreach_mul_(group, factor.to(group[0].device))  # pyright: ignore[reportPrivateImportUsage]


def nonfinite(shares: Sequence[Share | None], context: ParallelContext, *, zero1: bool = False) -> list[int]:
    """Return the indices in ``shares`` whose gradient is NaN or infinite on any rank; the same on every rank."""
    flags = [0 if share is None or bool(torch.isfinite(_values(share.grad)).all()) else 1 for share in shares]
    device = next((share.grad.device for share in shares if share is not None), transport_device())
    bad = torch.tensor(flags, dtype=torch.int32, device=device)
    for axis in ("tp", *_split_axes(context, zero1)):
        bad = comm.all_reduce(bad, context, axis, "max")
    return bad.nonzero().flatten().tolist()


_REFERENCE = also_called(ignored="force_spmd", neutral={"zero1_optimizer_groups": None})

# --- the documented functions -----------------------------------------------------------------------------


@_REFERENCE
def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    norm_type: float | int | str = 2,
    *,
    zero1_optimizer: bool = False,
    context: ParallelContext | None = None,
) -> Tensor:
    """Return the norm of the whole model's gradients over all ranks, like ``torch.nn.utils.get_total_norm``.

    ``parameters`` are this rank's: an iterable (also a generator) or one tensor; those without a gradient do not count.
    With ``zero1_optimizer`` they are the pieces that a ZeRO-1 optimizer updates, and the norm covers the data-parallel
    ranks too. Gradients must already be averaged over the data-parallel ranks. Every rank must call it.

    Returns a 0-d float32 tensor (float64 for float64 gradients), the same on every rank.
    """
    context = current_context() if context is None else context
    shares = _shares(parameters, context, zero1_optimizer)
    return total_norm(shares, norm_order(norm_type), context, zero1=zero1_optimizer)


@_REFERENCE
def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float | int,
    norm_type: float | int | str = 2,
    *,
    zero1_optimizer: bool = False,
    context: ParallelContext | None = None,
) -> Tensor:
    """Scale the whole model's gradients to a norm of at most ``max_norm``; return the norm before scaling.

    The arguments are those of :func:`get_grad_norm`. ``norm_type`` is any positive number, ``inf`` or ``"inf"``.
    Without parallelism this equals ``torch.nn.utils.clip_grad_norm_``. It does not reach a step with ZeRO-1 or master
    weights, which uses gradients of its own: set ``max_grad_norm`` there. Raises ParallelConfigError for gradients that
    the optimizer sums in ``param.main_grad``.
    """
    if context is None:
        require_no_lonely_rank("clip_grad_norm")
        context = current_context()
    shares = _shares(parameters, context, zero1_optimizer)
    norm = total_norm(shares, norm_order(norm_type), context, zero1=zero1_optimizer)
    clip_with_norm((share.grad for share in shares), float(max_norm), norm)
    return norm


def _shares(parameters: Iterable[Tensor] | Tensor, context: ParallelContext, over_dp: bool) -> list[Share]:
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    once = list({id(param): param for param in several}.values())
    if any(p.grad is None and getattr(p, "main_grad", None) is not None for p in once):
        raise ParallelConfigError(
            "gradients are summed in param.main_grad (use_fp32_grad_acc), so they cannot be clipped by hand: "
            "set max_grad_norm, and read optimizer.grad_norm"
        )
    return [
        Share(p.grad, counted_spans(p, context), "dp" if over_dp else "ep" if is_expert_parallel(p) else None)
        for p in once
        if p.grad is not None
    ]


def param_is_not_shared(param: Tensor) -> bool:
    """Return whether ``param`` belongs to this pipeline stage alone: one that several share has ``shared`` set."""
    return not getattr(param, "shared", False)


@torch.no_grad()
def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """Average gradients in place over the data parallel ranks, in at least float32, with one collective per dtype.

    With expert parallel ranks it is over the ranks with the same experts. Then a second call, for the gradients of all
    but the experts and with ``reduce_over_ep_group``, is over the ranks that share these; an expert's own gradient is
    their mean already, because it has had their tokens. The optimizers of this package do this themselves.
    """
    context = current_context()
    axis = "ep" if reduce_over_ep_group else "edp" if context.layout.ep > 1 else "dp"
    _sum_over(grads_list, context, axis, 1 / context.axis(axis).degree)


def allreduce_sequence_parallel_gradients(
    source: torch.optim.Optimizer | Iterable[Tensor], *, context: ParallelContext | None = None
) -> None:
    """Sum gradients over the tensor-parallel ranks, each of which has seen only its piece of the sequence.

    ``source`` is an optimizer or parameters; only those marked ``sequence_parallel_enabled`` (norm weights) are summed,
    with one collective per dtype. The optimizers of this package do this in their step: call it only without them, once
    after the last backward of a step.
    """
    context = current_context() if context is None else context
    groups = source.param_groups if isinstance(source, torch.optim.Optimizer) else [{"params": source}]
    params = [param for group in groups for param in group["params"]]
    sum_over_tp((p.grad for p in params if is_sequence_parallel(p) and p.grad is not None), context)


def is_sequence_parallel(param: Tensor) -> bool:
    """Return whether the gradients of ``param`` on the tensor-parallel ranks are partial sums."""
    return bool(getattr(param, "sequence_parallel_enabled", False)) and not split_over_ranks(param)


def sum_over_tp(grads: Iterable[Tensor], context: ParallelContext) -> None:
    """Sum tensors in place over the tensor-parallel ranks, in at least float32, with one collective per dtype."""
    _sum_over(grads, context, "tp")


def _sum_over(grads: Iterable[Tensor], context: ParallelContext, axis: str, factor: float = 1) -> None:
    if context.axis(axis).degree == 1:
        return
    for group in _by_type(grads):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        flat = comm.all_reduce(torch.cat([grad.reshape(-1).to(wide) for grad in group]), context, axis)
        parts = flat.split([grad.numel() for grad in group])
        for grad, part in zip(group, parts, strict=True):
            grad.copy_(part.view_as(grad) * factor if factor != 1 else part.view_as(grad))
