"""Losses for logits whose vocabulary is split over the tensor-parallel ranks, without gathering the logits.

Source: API guide, "Loss functions".
"""

from __future__ import annotations

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.context import ParallelContext, current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.base import require_inside

__all__ = ["from_parallel_logits_to_logprobs", "parallel_cross_entropy"]

IGNORED = -100
"""The label that losses leave out, in PyTorch, Hugging Face and here."""
NO_SECOND = b"losses on split logits have no second derivative: gather the logits, and use torch.nn.functional"


class _LogProbs(torch.autograd.Function):
    """The log-probability of each target, and the mean log-probability over the whole vocabulary.

    Uses two collectives: a maximum of the logits, then one sum for everything else. Columns from ``vocabulary`` on are
    padding.
    """

    @staticmethod
    def forward(ctx, logits, target, context, vocabulary):
        shifted = logits.to(torch.promote_types(logits.dtype, torch.float32))
        size = shifted.shape[-1]
        first = comm.axis_rank(context, "tp", target.device) * size
        padding = None
        if size * context.tp.degree > vocabulary:
            padding = torch.arange(size, device=target.device) + first >= vocabulary
            shifted = shifted.masked_fill(padding, float("-inf"))
        top = comm.all_reduce(shifted.amax(-1), context, "tp", "max")
        shifted = shifted - top.unsqueeze(-1)
        local = target - first
        own = (local >= 0) & (local < size)
        local = local.masked_fill(~own, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~own, 0)
        total = (shifted if padding is None else shifted.masked_fill(padding, 0)).sum(-1)
        exps = shifted.exp_()
        sums = torch.stack([exps.sum(-1), picked, total])
        exp_sum, picked, total = comm.all_reduce(sums, context)
        log_sum = exp_sum.log()
        ctx.save_for_backward(exps, exp_sum, local, own)
        ctx.dtype, ctx.vocabulary, ctx.padding = logits.dtype, vocabulary, padding
        ctx.set_materialize_grads(False)
        return picked - log_sum, total / vocabulary - log_sum

    @staticmethod
    def backward(ctx, *grads):
        with torch.no_grad():
            grad = _LogProbs.gradient(ctx, *grads)
        if torch.is_grad_enabled():
            # It depends on the logits even if no incoming gradient requires one, so once_differentiable is not enough.
            refused = torch._C._functions.DelayedError(NO_SECOND, 1)  # pyright: ignore[reportAttributeAccessIssue]
            grad = refused(grad.requires_grad_())
        return grad, None, None, None

    @staticmethod
    def gradient(ctx, *grads):
        # d chosen / d logit = [is target] - p;  d mean / d logit = 1 / vocabulary - p
        exps, exp_sum, local, own = ctx.saved_tensors
        for_chosen, for_mean = (torch.zeros_like(exp_sum) if grad is None else grad for grad in grads)
        grad = exps * (-(for_chosen + for_mean) / exp_sum).unsqueeze(-1)
        if grads[1] is not None:  # only smoothing reads the mean
            grad += (for_mean / ctx.vocabulary).unsqueeze(-1)
        grad.scatter_add_(-1, local.unsqueeze(-1), (for_chosen * own).unsqueeze(-1))
        if ctx.padding is not None:
            grad.masked_fill_(ctx.padding, 0)
        return grad.to(ctx.dtype)


def parallel_cross_entropy(
    parallel_logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = IGNORED,
    vocab_size: int | None = None,
    context: ParallelContext | None = None,
) -> Tensor:
    """Return the cross entropy of every token, as ``F.cross_entropy(..., reduction="none")`` on the full vocabulary.

    Args:
        parallel_logits: ``[..., vocabulary / degree]``, this rank's part of the logits; not modified.
        labels: ``[...]`` int64 over the whole vocabulary, the same on every rank. For ``ignore_index`` the loss and its
            gradient are zero.
        label_smoothing: 0 to 1; the smoothed part is spread over all classes, including the target.
        vocab_size: the vocabulary without padding; default: the columns of all ranks.

    Returns ``[...]`` in float32 (float64 for float64 logits). Raises ParallelConfigError for smoothing outside 0 to 1
    and for shapes that do not match, IndexError for a label outside the vocabulary.
    """
    context = current_context() if context is None else context
    if not 0.0 <= label_smoothing <= 1.0:
        raise ParallelConfigError(f"label_smoothing must lie between 0 and 1, got {label_smoothing}")
    if parallel_logits.shape[:-1] != labels.shape:
        raise ParallelConfigError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(parallel_logits.shape)}: "
            "labels must have all dimensions of the logits but the last"
        )
    if labels.is_floating_point():
        raise ParallelConfigError(f"labels must be class indices (int64), got {labels.dtype}: call labels.long()")
    counted = labels != ignore_index
    target = labels.masked_fill(~counted, 0)
    vocabulary = _vocabulary(parallel_logits, vocab_size, context)
    require_inside(target, vocabulary, "label")
    chosen, mean = _LogProbs.apply(parallel_logits, target, context, vocabulary)  # pyright: ignore
    loss = -chosen
    if label_smoothing > 0:  # separately, so that without smoothing a logit of -inf does not become nan
        loss = -(1 - label_smoothing) * chosen - label_smoothing * mean
    return loss.masked_fill(~counted, 0)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    inference: bool = True,
    *,
    vocab_size: int | None = None,
    context: ParallelContext | None = None,
) -> Tensor:
    """Return the log-probability of each next token, ``[batch, sequence - 1]`` in float32.

    ``vocab_parallel_logits``: ``[batch, sequence, vocabulary / degree]``. ``target``: the input tokens
    ``[batch, sequence]``; position i is scored with token i + 1. ``inference=False`` keeps the graph for backward.
    """
    context = current_context() if context is None else context
    vocabulary = _vocabulary(vocab_parallel_logits, vocab_size, context)
    require_inside(target, vocabulary, "label")
    with torch.set_grad_enabled(torch.is_grad_enabled() and not inference):
        chosen, _ = _LogProbs.apply(vocab_parallel_logits[:, :-1], target[:, 1:], context, vocabulary)  # pyright: ignore
    return chosen


def _vocabulary(logits: Tensor, vocab_size: int | None, context: ParallelContext) -> int:
    columns = logits.shape[-1] * context.tp.degree
    if vocab_size is None:
        return columns
    if not 1 <= vocab_size <= columns:
        raise ParallelConfigError(f"vocab_size must lie between 1 and the {columns} columns, got {vocab_size}")
    return vocab_size
