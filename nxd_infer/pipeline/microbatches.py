"""A batch in microbatches, and how much each counts in the loss of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nxd_infer.errors import InputMismatchError
from nxd_infer.parallel_layers.loss_functions import counting_targets

LABELS = "labels"
IGNORED = -100
"""The label that losses leave out, in PyTorch, Hugging Face and here."""

Count = Callable[[Tensor], Tensor]
"""The labels of a microbatch to the number of targets that its loss is the mean of."""


def split_batch(inputs: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split every tensor of a batch along its first dimension into ``count`` equal parts; other values are in each.

    Raises InputMismatchError for a tensor that does not divide.
    """
    rows = {name: value.shape[0] for name, value in inputs.items() if isinstance(value, Tensor) and value.dim()}
    for name, size in rows.items():
        if size % count or not size:
            fits = [number for number in range(1, size + 1) if size % number == 0]
            raise InputMismatchError(
                f"{name!r} has {size} rows, which num_microbatches={count} does not divide: use one of {fits}, or pass "
                f"a multiple of {count} rows"
            )
    parts = {name: inputs[name].chunk(count) for name in rows}
    return [{**inputs, **{name: part[i] for name, part in parts.items()}} for i in range(count)]


def probe_of(inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the inputs with labels that are ignored but in the first column; None without integer labels."""
    labels = inputs.get(LABELS)
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool or not labels.dim():
        return None
    probe = torch.full_like(labels, IGNORED)
    probe[:, :1] = 0 if labels.dim() > 1 else IGNORED
    if labels.dim() == 1:
        probe = torch.zeros_like(labels)
    return {**inputs, LABELS: probe}


def count_of(probe: Mapping[str, Any], counts: list[Tensor]) -> Count | None:
    """Return how a model counts its targets, from what it counted for :func:`probe_of`; None if it counts otherwise.

    A causal model predicts the next token: its loss leaves the first label of a row out.
    """
    labels = probe[LABELS]
    found = {int(count) for count in counts}
    if found == {0} and labels.dim() > 1:
        return lambda labels: (labels[:, 1:] != IGNORED).sum()
    if found == {labels.shape[0]}:
        return lambda labels: (labels != IGNORED).sum()
    return None


class _CrossEntropies(TorchFunctionMode):
    """Notes how many targets PyTorch's cross entropies do not ignore."""

    def __init__(self, counts: list[Tensor]):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            target = args[1] if len(args) > 1 else kwargs["target"]
            if not target.is_floating_point():
                self.counts.append((target != kwargs.get("ignore_index", IGNORED)).sum())
            with torch._C.DisableTorchFunction():  # one calls the other
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def watching_losses() -> Iterator[list[Tensor]]:
    """Inside the block, collect how many targets each cross entropy counts."""
    with counting_targets() as counts, _CrossEntropies(counts):
        yield counts


def loss_weights(parts: list[dict[str, Any]], count: Count | None) -> Tensor:
    """Return the weight of each microbatch's loss in that of the batch, float64 [microbatches].

    They are the shares of the targets, so that the loss is the mean over the batch; without a ``count`` they are equal.
    With Hugging Face's ``num_items_in_batch`` a loss is a sum already.
    """
    if parts[0].get("num_items_in_batch") is not None:
        return torch.ones(len(parts), dtype=torch.float64)
    if count is None or len(parts) == 1:
        return torch.full((len(parts),), 1 / len(parts), dtype=torch.float64)
    counts = torch.stack([count(part[LABELS]).cpu() for part in parts]).double()
    if not counts.any():
        return counts + float("nan")  # as the mean over no target is
    return counts / counts.sum()
