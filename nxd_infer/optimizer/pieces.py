"""The tensors that a rank's optimizer updates: parameters, float32 masters, or ranges of flat ZeRO-1 buckets.

A :class:`Piece` is a range of one parameter with the tensor that the optimizer updates for it. If the dtypes allow,
that tensor shares the parameter's memory and so sees weights that are loaded later; otherwise it is a master weight. A
piece never spans parameters, so hyperparameters, state and names stay those of the parameter, and state can be saved
under logical names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nxd_infer.comm.overlapped import Pending, start_all_gather
from nxd_infer.context import ParallelContext
from nxd_infer.optimizer.buckets import Bucket, GradReducer, Slot, wide_type
from nxd_infer.parallel_layers.grads import Spans, counted_spans, cut_spans

Sight = tuple[int, int, StorageWeakRef | None]
"""A parameter's version, address and storage. Memory that was freed may have its address again, but not its storage."""
NOWHERE: Sight = (-1, -1, None)


@dataclass
class Piece:
    """Elements ``start..stop`` of the flattened parameter ``index``."""

    index: int
    param: Tensor
    start: int
    stop: int
    tensor: Tensor
    """The tensor that the optimizer updates: flat with ZeRO-1, else of the parameter's shape."""
    spans: Spans
    """The elements of the piece that this rank counts in a norm, before adding data-parallel ranks."""
    own_memory: bool
    """Whether ``tensor`` is a copy (a master weight) that must be written back."""
    seen: Sight = NOWHERE
    """What the parameter was when ``tensor`` last matched it; its version only if ``tensor`` is a master weight."""

    def refresh(self) -> None:
        """Update ``tensor`` after the parameter's memory, or for a master weight its values, changed from outside.

        ``module.to()``, ``load_state_dict(assign=True)`` and ``param.data = ...`` change the memory,
        ``load_state_dict()`` the values. A master weight keeps elements that still round to the parameter's value, so a
        state loaded before its model stays exact. It does not see ``param.data.fill_()``, which leaves no trace.
        """
        if self.tensor is self.param or self.seen == self._now():
            return
        if self.own_memory:
            now = self.param.detach().reshape(-1)[self.start : self.stop].view(self.tensor.shape)
            kept = now == self.tensor.to(now.dtype)
            self.tensor.copy_(torch.where(kept, self.tensor, now.to(self.tensor.dtype)))
        else:
            self.tensor.data = self.param.detach().view(-1)[self.start : self.stop].view(self.tensor.shape)
        self.settled()

    def settled(self) -> None:
        """Record that parameter and tensor match now."""
        self.seen = self._now()

    def copied(self) -> None:
        """Record that parameter and tensor are copies of a matching pair, but do not share memory yet."""
        self.seen = self._now() if self.own_memory else NOWHERE

    def _now(self) -> Sight:
        version = self.param._version if self.own_memory else 0
        return version, self.param.data_ptr(), StorageWeakRef(self.param.untyped_storage())

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "seen": NOWHERE}  # a copied weak reference would be freed twice


Masters = bool | torch.dtype
"""Whether to update copies of the parameters, and in which dtype: False, at least float32 (True), or this dtype."""


def make_pieces(reducer: GradReducer, master_weights: Masters, first: int = 0) -> list[Piece]:
    """Return this rank's pieces of the parameters from index ``first`` on, in order.

    These are whole parameters, or if ``reducer`` scatters, the parts in this rank's equal share of every bucket.
    """
    if not (reducer.scatter and reducer.communicates):
        return [_piece(reducer, index, None, master_weights) for index in range(first, len(reducer.params))]
    pieces = []
    for bucket in reducer.buckets:
        low, high = shard_of(bucket, reducer.context)
        for slot in bucket.slots:
            start, stop = max(low, slot.start), min(high, slot.stop)
            if slot.index >= first and start < stop:
                pieces.append(_piece(reducer, slot.index, (start - slot.start, stop - slot.start), master_weights))
    return sorted(pieces, key=lambda piece: piece.index)


def _piece(reducer: GradReducer, index: int, shard: tuple[int, int] | None, master_weights: Masters) -> Piece:
    """Return the range ``shard`` of a parameter as a flat piece, or the full parameter in its shape."""
    param = reducer.params[index]
    start, stop = shard or (0, param.numel())
    dtype = wide_type(param.dtype) if master_weights is True else master_weights or param.dtype
    own_memory = dtype != param.dtype or not param.is_contiguous()
    if shard is None and not own_memory and not reducer.sums_apart(index):
        tensor = param
    else:
        tensor = param.detach().reshape(-1)[start:stop]
        tensor = tensor.to(dtype, copy=True) if own_memory else tensor
        tensor = tensor.view(param.shape) if shard is None else tensor
    spans = cut_spans(counted_spans(param, reducer.context), start, stop)
    if tensor is not param:
        tensor.nxd_spans = spans  # pyright: ignore[reportAttributeAccessIssue]
    piece = Piece(index, param, start, stop, tensor, spans, own_memory)
    piece.settled()
    return piece


def shard_of(bucket: Bucket, context: ParallelContext) -> tuple[int, int]:
    """Return the range of a bucket that belongs to this data-parallel rank."""
    here = context.axis(bucket.axis)
    size = bucket.size // here.degree
    return here.rank * size, (here.rank + 1) * size


class Publisher:
    """Writes updated pieces back to the parameters, gathering sharded ones from the other ranks."""

    def __init__(self, reducer: GradReducer, pieces: Sequence[Piece]):
        self._reducer = reducer
        self._pieces = list(pieces)
        self._by_index = {piece.index: piece for piece in pieces}
        self._flat: list[Tensor | None] = [None] * len(reducer.buckets)

    @torch.no_grad()
    def publish(self, only_changes: bool = False) -> None:
        """Write the results of all ranks' optimizers to every parameter.

        ``only_changes``: leave a parameter with equal values untouched, because a backward may need it unmodified.
        """
        write = _write_changes if only_changes else Tensor.copy_
        if not self._reducer.scatter or not self._reducer.communicates:
            for piece in self._pieces:
                if piece.own_memory:
                    write(piece.param, piece.tensor.view(piece.param.shape))
                    piece.settled()
            return
        started = [self._start(i, bucket) for i, bucket in enumerate(self._reducer.buckets)]
        for bucket, pending in zip(self._reducer.buckets, started, strict=True):
            flat = pending.wait()
            for slot in bucket.slots:
                self._write_back(slot, flat, shard_of(bucket, self._reducer.context), write)
        for piece in self._pieces:
            piece.settled()

    def _write_back(
        self, slot: Slot, flat: Tensor, own: tuple[int, int], write: Callable[[Tensor, Tensor], object]
    ) -> None:
        """Copy a parameter from its bucket, except the range ``own`` that was updated in the parameter's memory."""
        param, piece = self._reducer.params[slot.index], self._by_index.get(slot.index)
        if piece is None or piece.own_memory:
            write(param, flat[slot.start : slot.stop].view(param.shape))
            return
        values = param.detach().view(-1)
        for start, stop in ((slot.start, min(slot.stop, own[0])), (max(slot.start, own[1]), slot.stop)):
            if start < stop:
                write(values[start - slot.start : stop - slot.start], flat[start:stop])

    def _start(self, number: int, bucket: Bucket) -> Pending:
        dtype = self._reducer.params[bucket.slots[0].index].dtype
        flat = bucket.flat
        # The gradients' buffer is free after a step, but not between a backward and its step.
        if flat is None or flat.dtype != dtype or bucket.pending is not None:
            flat = self._flat[number]
        if flat is None:
            flat = self._flat[number] = torch.zeros(bucket.size, dtype=dtype, device=bucket.device)
        for slot in bucket.slots:
            piece = self._by_index.get(slot.index)
            if piece is not None:
                at = slot.start + piece.start
                flat[at : at + piece.tensor.numel()].copy_(piece.tensor.reshape(-1))
        return start_all_gather(flat, self._reducer.context, bucket.axis)

    @torch.no_grad()
    def gather(self, values: Sequence[Tensor | None]) -> list[Tensor]:
        """Return full tensors of the parameters' shapes from the values of all pieces (None is zeros). A collective."""
        whole: dict[int, Tensor] = {}
        of_piece = {piece.index: value for piece, value in zip(self._pieces, values, strict=True)}
        if not self._reducer.scatter or not self._reducer.communicates:
            for piece, value in zip(self._pieces, values, strict=True):
                whole[piece.index] = torch.zeros_like(piece.tensor) if value is None else value.clone()
            return [whole[i].view(param.shape) for i, param in enumerate(self._reducer.params)]
        for bucket in self._reducer.buckets:
            flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
            for slot in bucket.slots:
                value = of_piece.get(slot.index)
                if value is not None:
                    at = slot.start + self._by_index[slot.index].start
                    flat[at : at + value.numel()].copy_(value.reshape(-1))
            flat = start_all_gather(flat, self._reducer.context, bucket.axis).wait()
            for slot in bucket.slots:
                whole[slot.index] = flat[slot.start : slot.stop].view(self._reducer.params[slot.index].shape)
        return [whole[i] for i in range(len(self._reducer.params))]


def _write_changes(target: Tensor, source: Tensor) -> None:
    if not torch.equal(target, source.to(target.dtype)):
        target.copy_(source)
