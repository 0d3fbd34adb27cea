"""Average gradients over the data-parallel ranks in flat buckets, while the backward pass is still running.

A hook on each parameter notices its gradient; when all gradients of a bucket have arrived, the bucket is reduced during
the rest of the backward. Buckets are reduced in the same order on every rank, so different arrival orders cannot mix
them up.

Gradient accumulation needs no extra call. A step records how many backward passes it took and which parameters they
reached, and the next step reduces in the last of that many passes; unexpected gradients are reduced in ``finish``. The
ranks agree on this in one small collective, which also tells which parameters have a gradient on any rank.

A bucket that still waits when that last pass ends (this rank did not use a parameter) is reduced then, because other
ranks have reduced it during the pass: a collective of the caller between backward and step must not come in between.

With several optimizers over the same ranks, nothing is reduced before the steps, whose order is the same on every rank.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from nxd_infer import comm
from nxd_infer.comm.overlapped import Pending, start_all_reduce, start_reduce_scatter
from nxd_infer.context import ParallelContext
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.grads import is_expert_parallel, is_sequence_parallel

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
    axis: str = "dp"
    """The ranks that hold these parameters: dp, or edp for experts if expert parallel ranks hold different ones."""
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
    """Return buckets over ``params[first:]`` in reverse, each of one axis, device and dtype; no parameter spans two.

    Gradients are reduced in ``reduce_dtype``, or in their own dtype if that is wider.
    """
    buckets: list[Bucket] = []
    open_for: dict[tuple, Bucket] = {}
    for index in reversed(range(first, len(params))):
        param = params[index]
        dtype = torch.promote_types(param.dtype, reduce_dtype)
        axis = "edp" if is_expert_parallel(param) else "dp"
        key = (param.device, param.dtype, axis)
        bucket = open_for.get(key)
        if bucket is None or (bucket.size + param.numel()) * dtype.itemsize > cap_mb * MEGABYTE:
            bucket = open_for[key] = Bucket([], 0, dtype, param.device, axis)
            buckets.append(bucket)
        bucket.slots.append(Slot(index, bucket.size, bucket.size + param.numel()))
        bucket.size += param.numel()
    for bucket in buckets:
        bucket.size = max(bucket.size + -bucket.size % degree, degree)  # parameters may be empty, messages may not
    return buckets


_reducer_of: MutableMapping[Tensor, tuple[weakref.ref[GradReducer], int]] = WeakTensorKeyDictionary()
"""Who reduces a parameter, and its index there."""
_sums: MutableMapping[Tensor, weakref.ref[Tensor]] = WeakTensorKeyDictionary()
"""The gradient of a parameter that is a sum over the tensor-parallel ranks, whichever optimizer has summed it."""
_reducers: weakref.WeakSet[GradReducer] = weakref.WeakSet()


class GradReducer:
    """Averages the gradients of ``params`` over the data-parallel ranks: of experts, over the ranks that hold them.

    ``scatter``: each rank gets the average of only its equal share of every bucket.
    ``accumulate_dtype``: narrower gradients are summed over backward passes in this dtype, in ``param.main_grad``, and
    ``param.grad`` is set to None.
    ``reduce_dtype``: narrower gradients are summed over the ranks in this dtype.
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
            raise ParallelConfigError(f"the size of a bucket must be a positive number of megabytes, got {cap_mb}")
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
        """Parameters that no backward pass of the last step reached; buckets do not wait for them."""
        self._expected = 1
        """Backward passes that reach a parameter before the step."""
        self._expected_ends = 1
        """Backward passes before the step, whichever parameters they reach."""
        self._ends, self._task = 0, -1
        self._next = 0
        self._known: list[weakref.ref[Tensor] | None] = []
        self._summed: set[int] = set()
        self._hooks: dict[int, list[RemovableHandle]] = {}
        self._overlaps = True
        """Whether buckets are reduced during the backward pass."""
        self.extend(params)

    def extend(self, params: Sequence[Tensor]) -> None:
        """Add parameters, in separate buckets after the existing ones."""
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
        """Register hooks on the parameters from index ``first`` on."""
        _reducers.add(self)
        for index in range(first, len(self.params)):
            self._hook_on(index)
        self._look_for_others()

    def _hook_on(self, index: int) -> None:
        param = self.params[index]
        this: weakref.ref[GradReducer] = weakref.ref(self)
        former, place = _reducer_of.get(param, (this, index))
        former = former()
        if former is not None:
            former.release(place)  # otherwise both would reduce
        _reducer_of[param] = this, index
        self._hooks[index] = [param.register_post_accumulate_grad_hook(_hook(this, GradReducer.arrived, index))]
        if self.context.tp.degree > 1 and is_sequence_parallel(param):
            self._hooks[index].append(param.register_hook(_hook(this, GradReducer.coming, index)))

    def _look_for_owners(self) -> None:
        """Hook again on parameters whose later optimizer is gone. Refuse those whose gradients it sums elsewhere."""
        for index, param in enumerate(self.params):
            if index in self._hooks:
                continue
            owner, _ = _reducer_of[param]
            if self._sums_elsewhere(owner(), param):
                gc.collect()  # it may be one that nobody uses any more
                if self._sums_elsewhere(owner(), param):
                    raise ParallelConfigError(
                        f"a later optimizer sums the gradients of a parameter of shape {tuple(param.shape)} in another "
                        "place or dtype: give both the same fp32_grad_acc (use_grad_acc_hook) and master weights"
                    )
            if owner() is None:
                self._hook_on(index)
                self._fold(index)

    def __getstate__(self) -> dict[str, Any]:
        """Copy the state between two steps, whatever the current state: no gradients, and new hooks."""
        buckets = [
            Bucket(bucket.slots, bucket.size, bucket.dtype, bucket.device, bucket.axis) for bucket in self.buckets
        ]
        return {
            **vars(self),
            "buckets": buckets,
            "_place_of": {},
            "_hooks": {},
            "_overlaps": True,
            "_known": [None] * len(self.params),
            "_summed": set(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._place_of = {slot.index: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        self._start_over()
        self._watch(0)

    def release(self, index: int) -> None:
        """Remove the hooks from a parameter."""
        for hook in self._hooks.pop(index, ()):
            hook.remove()

    @property
    def communicates(self) -> bool:
        return self.degree > 1 and bool(self.params)

    def _others(self) -> list[GradReducer]:
        """Return the other reducers over these ranks, also those whose parameters later ones have taken."""
        several = [other for other in list(_reducers) if other is not self and other.context == self.context]
        return [other for other in several if other.communicates]

    def _look_for_others(self) -> None:
        """From the second optimizer over these ranks on, reduce no bucket of either before its step.

        If a backward pass reaches only some of their parameters on a rank, the order of their buckets differs from that
        of other ranks; the order of the steps does not. Decided here, after a collection, and in :meth:`finish`, where
        the ranks agree: when an optimizer that nobody uses any more is freed may differ, too.
        """
        if self.communicates and self._others():
            gc.collect()
            for other in self._others():
                self._overlaps = other._overlaps = False

    def _sum_type(self, param: Tensor) -> torch.dtype:
        """Return the dtype in which a parameter's gradients are summed over backward passes."""
        wide = self._accumulate_dtype
        return param.dtype if wide is None else torch.promote_types(param.dtype, wide)

    def _sums_elsewhere(self, later: GradReducer | None, param: Tensor) -> bool:
        return later is not None and later._sum_type(param) != self._sum_type(param)

    def sums_apart(self, index: int) -> bool:
        """Return whether a parameter's gradients are summed in ``main_grad``."""
        return self._wide[index]

    def gradient(self, index: int) -> Tensor | None:
        """Return a parameter's gradient, summed over the backward passes on this rank."""
        param = self.params[index]
        return getattr(param, "main_grad", None) if self._wide[index] else param.grad

    def zero(self) -> None:
        """Drop the gradients in ``main_grad``; the optimizer zeroes those in ``param.grad``."""
        for param, wide in zip(self.params, self._wide, strict=True):
            if wide:
                param.main_grad = None  # pyright: ignore[reportAttributeAccessIssue]

    # --- during the backward pass ---------------------------------------------------------------------

    def coming(self, index: int) -> None:
        """Note that a backward pass will add to a gradient.

        If that is a sum over the tensor-parallel ranks, keep an equal share of it, because the shares are summed again.
        """
        if self.is_sum(index):
            self.gradient(index).div_(self.context.tp.degree)  # pyright: ignore[reportOptionalMemberAccess]
        _sums.pop(self.params[index], None)
        self._summed.discard(index)

    def arrived(self, index: int) -> None:
        """Note that a backward pass has added to a parameter's gradient."""
        self._fold(index)
        self._passes[index] += 1
        if not self.communicates:
            return
        self._notice_the_end()
        bucket, _ = self._place_of[index]
        if bucket.pending is not None:
            bucket.dirty = True
        elif self._passes[index] == self._expected and self._overlaps:
            bucket.waiting -= not self._silent[index]
            while self._next < len(self.buckets) and self.buckets[self._next].waiting == 0:
                self._launch(self.buckets[self._next])
                self._next += 1

    def _fold(self, index: int) -> None:
        """Add a parameter's gradient to the sum in ``main_grad``, if that is where its gradients are summed."""
        param = self.params[index]
        if self._wide[index] and param.grad is not None:
            sum_ = getattr(param, "main_grad", None)
            grad = param.grad.to(self._sum_type(param))
            param.main_grad = grad if sum_ is None else sum_.add_(grad)  # pyright: ignore
            param.grad = None

    def _notice_the_end(self) -> None:
        """Have the end of the running backward pass call :meth:`_ended`, once."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._task):  # -1: the hook was called by hand
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)  # pyright: ignore

    def _ended(self) -> None:
        self._ends += 1
        if self._ends == self._expected_ends and self._overlaps:
            self._launch_rest()

    def _launch_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._next = len(self.buckets)

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
        bucket.pending = start(bucket.flat, self.context, bucket.axis)
        bucket.dirty = False

    # --- before the step ------------------------------------------------------------------------------

    def is_fresh(self, index: int) -> bool:
        """Return whether a parameter's gradient was replaced, or a backward added to it, since :meth:`settle`."""
        known, grad = self._known[index], self.gradient(index)
        return self._passes[index] > 0 or (grad is not None and (known is None or known() is not grad))

    def is_sum(self, index: int) -> bool:
        """Return whether a parameter's gradient is a sum over the tensor-parallel ranks, to which nothing was added."""
        sum_, grad = _sums.get(self.params[index]), self.gradient(index)
        return sum_ is not None and grad is not None and sum_() is grad

    def settle(self, summed: Collection[int] = ()) -> None:
        """Mark the current gradients as processed. Those at ``summed`` are sums over the tensor-parallel ranks now."""
        grads = [self.gradient(index) for index in range(len(self.params))]
        known = [None if grad is None else weakref.ref(grad) for grad in grads]
        # What replaces a sum is made of it. A backward may have added to one, though, and another optimizer noted it.
        self._summed = {i for i in self._summed if self.is_sum(i) or known[i] is not self._known[i]} | set(summed)
        for index in self._summed:
            if (grad := known[index]) is not None:
                _sums[self.params[index]] = grad
        self._known = known
        if any(self._passes):
            self._silent = [passes == 0 for passes in self._passes]
        self._start_over()

    def finish(self, final: bool = False) -> tuple[list[bool], list[bool]]:
        """Reduce the remaining buckets and wait for all.

        Returns for each parameter whether any rank has a gradient, and whether it is fresh on any rank: with ``final``,
        whether a backward pass added to it, because what replaces a final gradient is made of it. Afterwards each
        bucket's ``result`` is the average over the ranks. Every data-parallel rank must call it.
        """
        self._look_for_owners()
        has = [self.gradient(index) is not None for index in range(len(self.params))]
        fresh = [self._passes[i] > 0 if final else self.is_fresh(i) for i in range(len(self.params))]
        if not self.communicates:
            return has, fresh
        self._launch_rest()
        changed = [bucket.dirty or self._modified(bucket) for bucket in self.buckets]
        counts = [bool(self._others()), max(self._passes, default=1), self._ends]
        ours = torch.tensor([*changed, *has, *fresh, *counts], dtype=torch.int32)
        agreed = comm.all_reduce(ours.to(self.buckets[0].device), self.context, "dp", "max").tolist()
        for bucket, again in zip(self.buckets, agreed, strict=False):
            assert bucket.pending is not None
            bucket.result = bucket.pending.wait()
            if again:
                self._launch(bucket)
                bucket.result = bucket.pending.wait()
            bucket.result.mul_(1.0 / self.context.axis(bucket.axis).degree)
            bucket.pending = None
        self._expected, self._expected_ends = (max(1, count) for count in agreed[-2:])
        self._overlaps = not agreed[-3]
        flags = [bool(flag) for flag in agreed[len(self.buckets) : -3]]
        return flags[: len(self.params)], flags[len(self.params) :]

    def averaged(self, index: int, start: int, stop: int) -> Tensor | None:
        """Return elements ``start..stop`` of an averaged gradient as a flat view, after :meth:`finish`.

        Without other ranks, return the gradient itself, in its shape.
        """
        if not self.communicates:
            return self.gradient(index)
        bucket, slot = self._place_of[index]
        assert bucket.result is not None
        here = self.context.axis(bucket.axis)
        first = slot.start - (here.rank * (bucket.size // here.degree) if self.scatter else 0)
        return bucket.result[first + start : first + stop]

    def _modified(self, bucket: Bucket) -> bool:
        """Return whether a gradient was replaced or changed since it was copied."""
        grads = [self.gradient(slot.index) for slot in bucket.slots]
        return any(
            grad is not seen or (grad is not None and grad._version != version)
            for grad, (seen, version) in zip(grads, bucket.seen, strict=True)
        )

    def _start_over(self) -> None:
        self._passes = [0] * len(self.params)
        self._next = self._ends = 0
        for bucket in self.buckets:
            self._empty(bucket)

    def _empty(self, bucket: Bucket) -> None:
        """Reset a bucket for the next step."""
        bucket.waiting = sum(not self._silent[slot.index] for slot in bucket.slots)
        bucket.pending, bucket.dirty, bucket.seen = None, False, []


def _hook(
    reducer: weakref.ref[GradReducer], method: Callable[[GradReducer, int], None], index: int
) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            method(alive, index)

    return hook
