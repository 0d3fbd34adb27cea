"""Parameters in flat buckets of about ``cap_mb``, in reverse order: as a backward pass reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nxd_infer.comm.overlapped import Pending

MEGABYTE = 1 << 20


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums and master weights: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Slot:
    """A parameter's range in its bucket: ``start`` and ``stop`` in flat elements."""

    index: int
    """The parameter's index in the reducer's list."""
    start: int
    stop: int


@dataclass
class Bucket:
    """Parameters reduced together. ``size`` is a multiple of ``degree``, with fewer than ``degree`` padded elements."""

    slots: list[Slot]
    size: int
    dtype: torch.dtype
    device: torch.device
    flat: Tensor | None = None
    waiting: int = 0
    pending: Pending | None = None
    seen: list[tuple[Tensor | None, int]] = field(default_factory=list)
    """The gradients that were copied, and their versions at that time."""
    dirty: bool = False
    result: Tensor | None = None
    """The average of the whole bucket, or with ``scatter`` of this rank's equal share of it."""


def make_buckets(
    params: Sequence[Tensor], degree: int, cap_mb: float, first: int = 0, reduce_dtype: torch.dtype = torch.float32
) -> list[Bucket]:
    """Return buckets over ``params[first:]`` in reverse, each of one device and dtype; no parameter spans two buckets.

    Gradients are reduced in ``reduce_dtype``, or in their own dtype if that is wider.
    """
    buckets: list[Bucket] = []
    open_for: dict[tuple, Bucket] = {}
    for index in reversed(range(first, len(params))):
        param = params[index]
        dtype = torch.promote_types(param.dtype, reduce_dtype)
        key = (param.device, param.dtype)
        bucket = open_for.get(key)
        if bucket is None or (bucket.size + param.numel()) * dtype.itemsize > cap_mb * MEGABYTE:
            bucket = open_for[key] = Bucket([], 0, dtype, param.device)
            buckets.append(bucket)
        bucket.slots.append(Slot(index, bucket.size, bucket.size + param.numel()))
        bucket.size += param.numel()
    for bucket in buckets:
        bucket.size = max(bucket.size + -bucket.size % degree, degree)  # parameters may be empty, messages may not
    return buckets
