"""Averaging gradients over the data-parallel ranks in flat buckets, while the backward pass is still running.

Parameters are laid one after the other, the last first, into buckets of about ``cap_mb``. A hook on each parameter sees
its gradient arrive; when all of a bucket's have, the bucket is reduced beside the rest of the backward. Buckets go in
one order on every rank, so ranks whose gradients arrive in different orders cannot cross.

Gradient accumulation needs no announcement. A step learns how many backward passes it took and which parameters they
reached, and the next one reduces in the last of as many; what comes unexpectedly is reduced in ``finish``. The ranks
agree on that in one small collective, which also says which parameters have a gradient anywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nxd_infer import comm
from nxd_infer.comm.overlapped import Pending, start_all_reduce, start_reduce_scatter
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ParallelConfigError

MEGABYTE = 1 << 20
_reducer_of: MutableMapping[Tensor, weakref.ref[GradReducer]] = WeakTensorKeyDictionary()


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and master weights: float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Slot:
    """Where a parameter lies in its bucket: ``start`` and ``stop`` in flat elements."""

    index: int
    """The parameter's place in the reducer's list."""
    start: int
    stop: int


@dataclass
class Bucket:
    """Parameters reduced together. ``size`` is a multiple of the ranks: at most ``degree - 1`` elements are filling."""

    slots: list[Slot]
    size: int
    dtype: torch.dtype
    device: torch.device
    flat: Tensor | None = None
    waiting: int = 0
    pending: Pending | None = None
    seen: list[tuple[Tensor | None, int]] = field(default_factory=list)
    """The gradients that were copied, and their versions then."""
    dirty: bool = False
    result: Tensor | None = None
    """The average: of the whole bucket, or with ``scatter`` of this rank's equal piece of it."""


def make_buckets(
    params: Sequence[Tensor], degree: int, cap_mb: float, first: int = 0, reduce_dtype: torch.dtype = torch.float32
) -> list[Bucket]:
    """Buckets over ``params[first:]``, last first, of one device and type each; a parameter is never split over two.

    Gradients travel in ``reduce_dtype``, or in their own type where that is wider.
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


class GradReducer:
    """Brings the gradients of ``params`` from the data-parallel ranks together.

    ``scatter``: each rank gets the average of its equal piece of every bucket, instead of everything.
    ``accumulate_dtype``: gradients of a narrower type are summed over backward passes in ``param.main_grad``, in this
    type, and ``param.grad`` is emptied.
    ``reduce_dtype``: gradients of a narrower type are summed over the ranks in this one.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        context: ParallelContext,
        *,
        scatter: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype = torch.float32,
        cap_mb: float = 25.0,
    ):
        if not cap_mb > 0:
            raise ParallelConfigError(f"a bucket holds a positive number of megabytes, got {cap_mb}")
        self.params: list[Tensor] = []
        self.context = context
        self.scatter = scatter
        self.degree = context.dp.degree
        self.buckets: list[Bucket] = []
        self._accumulate_dtype, self._reduce_dtype, self._cap_mb = accumulate_dtype, reduce_dtype, cap_mb
        self._place_of: dict[int, tuple[Bucket, Slot]] = {}
        self._wide: list[bool] = []
        self._passes: list[int] = []
        self._silent: list[bool] = []
        """Parameters that no backward pass of the last step reached: no bucket waits for them."""
        self._expected = 1
        self._next = 0
        self._known: list[weakref.ref[Tensor] | None] = []
        self._hooks = []
        self.extend(params)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Reduce the gradients of more parameters too, in buckets of their own after the others."""
        first = len(self.params)
        self.params += params
        self._wide += [self._sum_type(p) != p.dtype for p in params]
        self._passes += [0] * len(params)
        self._silent += [False] * len(params)
        self._known += [None] * len(params)
        for bucket in make_buckets(self.params, self.degree, self._cap_mb, first, self._reduce_dtype):
            self.buckets.append(bucket)
            self._place_of.update({slot.index: (bucket, slot) for slot in bucket.slots})
            self._empty(bucket)
        self._watch(first)

    def _watch(self, first: int) -> None:
        """Put hooks on the parameters from place ``first`` on."""
        for index, param in enumerate(self.params[first:], first):
            former = _reducer_of.get(param)
            former = former and former()
            if former is not None:
                former.close()  # its optimizer has been replaced; both reducing would be once too often
            _reducer_of[param] = weakref.ref(self)
            self._hooks.append(param.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index)))

    def __getstate__(self) -> dict[str, Any]:
        """A copy is between steps, whatever this one is doing: gradients are not copied, and its hooks are its own."""
        buckets = [Bucket(bucket.slots, bucket.size, bucket.dtype, bucket.device) for bucket in self.buckets]
        return {**vars(self), "buckets": buckets, "_place_of": {}, "_hooks": [], "_known": [None] * len(self.params)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._place_of = {slot.index: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        self._start_over()
        self._watch(0)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def communicates(self) -> bool:
        return self.degree > 1 and bool(self.params)

    def _sum_type(self, param: Tensor) -> torch.dtype:
        """The type in which the gradients of a parameter are summed over backward passes."""
        wanted = self._accumulate_dtype
        return param.dtype if wanted is None else torch.promote_types(param.dtype, wanted)

    def sums_apart(self, index: int) -> bool:
        """Whether the gradient of a parameter is summed up in ``main_grad``."""
        return self._wide[index]

    def gradient(self, index: int) -> Tensor | None:
        """What backward passes on this rank have summed up for a parameter."""
        param = self.params[index]
        return getattr(param, "main_grad", None) if self._wide[index] else param.grad

    def zero(self) -> None:
        """Forget gradients summed in ``main_grad``; those in ``param.grad`` are the optimizer's to zero."""
        for param, wide in zip(self.params, self._wide, strict=True):
            if wide:
                param.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    # --- during the backward pass ---------------------------------------------------------------------

    def arrived(self, index: int) -> None:
        """A backward pass has added to the gradient of a parameter."""
        param = self.params[index]
        if self._wide[index] and param.grad is not None:
            sum_ = getattr(param, "main_grad", None)
            grad = param.grad.to(self._sum_type(param))
            param.main_grad = grad if sum_ is None else sum_.add_(grad)  # pyright: ignore
            param.grad = None
        self._passes[index] += 1
        if not self.communicates:
            return
        bucket, _ = self._place_of[index]
        if bucket.pending is not None:
            bucket.dirty = True
        elif self._passes[index] == self._expected:
            bucket.waiting -= not self._silent[index]
            while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
                self._launch(self.buckets[self._next])
                self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        if bucket.flat is None:
            bucket.flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
        bucket.seen = []
        for slot in bucket.slots:
            grad, place = self.gradient(slot.index), bucket.flat[slot.start : slot.stop]
            bucket.seen.append((grad, 0 if grad is None else grad._version))
            if grad is None:
                place.zero_()
            else:
                place.copy_((grad.to_dense() if grad.is_sparse else grad).detach().reshape(-1))
        start = start_reduce_scatter if self.scatter else start_all_reduce
        bucket.pending = start(bucket.flat, self.context, "dp")
        bucket.dirty = False

    # --- before the step ------------------------------------------------------------------------------

    def is_fresh(self, index: int) -> bool:
        """Whether the gradient of a parameter is another one than :meth:`settle` knew, or a backward added to it."""
        known, grad = self._known[index], self.gradient(index)
        return self._passes[index] > 0 or (grad is not None and (known is None or known() is not grad))

    def settle(self) -> None:
        """The gradients as they are now have been dealt with."""
        grads = [self.gradient(index) for index in range(len(self.params))]
        self._known = [None if grad is None else weakref.ref(grad) for grad in grads]
        if any(self._passes):
            self._silent = [passes == 0 for passes in self._passes]
        self._start_over()

    def finish(self) -> tuple[list[bool], list[bool]]:
        """Reduce what has not been and wait for everything.

        Returns of each parameter whether any rank has a gradient, and whether it is fresh on any. Afterwards each
        bucket's ``result`` is the average over the ranks. Every data-parallel rank must call it.
        """
        has = [self.gradient(index) is not None for index in range(len(self.params))]
        fresh = [self.is_fresh(index) for index in range(len(self.params))]
        if not self.communicates:
            return has, fresh
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        changed = [bucket.dirty or self._modified(bucket) for bucket in self.buckets]
        ours = torch.tensor([*changed, *has, *fresh, max(self._passes, default=1)], dtype=torch.int32)
        agreed = comm.all_reduce(ours.to(self.buckets[0].device), self.context, "dp", "max").tolist()
        for bucket, again in zip(self.buckets, agreed, strict=False):
            assert bucket.pending is not None
            bucket.result = bucket.pending.wait()
            if again:
                self._launch(bucket)
                bucket.result = bucket.pending.wait()
            bucket.result.mul_(1.0 / self.degree)
            bucket.pending = None
        self._expected = max(1, agreed[-1])
        flags = [bool(flag) for flag in agreed[len(self.buckets) : -1]]
        return flags[: len(self.params)], flags[len(self.params) :]

    def averaged(self, index: int, start: int, stop: int) -> Tensor | None:
        """After :meth:`finish`: elements ``start..stop`` of the average of a gradient, flat; a view.

        Without other ranks it is the gradient itself, in its shape.
        """
        if not self.communicates:
            return self.gradient(index)
        bucket, slot = self._place_of[index]
        assert bucket.result is not None
        first = slot.start - (self.context.dp.rank * (bucket.size // self.degree) if self.scatter else 0)
        return bucket.result[first + start : first + stop]

    def _modified(self, bucket: Bucket) -> bool:
        """Whether a gradient is another one, or has other values, than when it was copied."""
        grads = [self.gradient(slot.index) for slot in bucket.slots]
        return any(
            grad is not seen or (grad is not None and grad._version != version)
            for grad, (seen, version) in zip(grads, bucket.seen, strict=True)
        )

    def _start_over(self) -> None:
        self._passes = [0] * len(self.params)
        self._next = 0
        for bucket in self.buckets:
            self._empty(bucket)

    def _empty(self, bucket: Bucket) -> None:
        """Nothing of the next step has arrived yet."""
        bucket.waiting = sum(not self._silent[slot.index] for slot in bucket.slots)
        bucket.pending, bucket.dirty, bucket.seen = None, False, []


def _hook(reducer: weakref.ref[GradReducer], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive.arrived(index)

    return hook
