"""What one rank's optimizer steps: whole parameters, float32 masters of them, or with ZeRO-1 ranges of flat buckets.

A :class:`Piece` is a range of one parameter together with the tensor that the optimizer is given for it. That tensor is
the parameter's own memory where the types allow, so weights that are loaded later are seen; otherwise it is a master.
A piece never spans parameters: hyperparameters, state and names stay those of the parameter, and state can be saved
under logical names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nxd_infer import comm
from nxd_infer.comm.overlapped import Pending, start_all_gather
from nxd_infer.context import ParallelContext
from nxd_infer.optimizer.buckets import Bucket, GradReducer, Slot, wide_type
from nxd_infer.parallel_layers.grads import Spans, counted_spans, cut_spans

NOWHERE = -1
"""No memory address."""


@dataclass
class Piece:
    """Elements ``start..stop`` of the flattened parameter ``index``."""

    index: int
    param: Tensor
    start: int
    stop: int
    tensor: Tensor
    """What the optimizer steps: flat with ZeRO-1, else of the parameter's shape."""
    spans: Spans
    """The elements of the piece that this rank counts in a norm, before the data-parallel ranks are added."""
    own_memory: bool
    """Whether ``tensor`` is a copy (a master), which must be written back."""
    seen: int = 0
    """What the parameter was when ``tensor`` last agreed with it: its memory, or for a master its version."""

    @property
    def whole(self) -> bool:
        return (self.start, self.stop) == (0, self.param.numel())

    def values(self) -> Tensor:
        """The parameter's own elements of this piece, shaped like ``tensor``; a view."""
        flat = self.param.detach().view(-1)[self.start : self.stop]
        return flat.view(self.tensor.shape)

    def refresh(self) -> None:
        """Follow a parameter that has been given other memory, or, for a master, other values, by somebody else.

        ``module.to()`` and ``load_state_dict(assign=True)`` do the one, ``load_state_dict()`` the other. A master keeps
        the elements whose rounded value the parameter still has: a state that is loaded before its model stays exact.
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
        """Parameter and tensor agree now."""
        self.seen = self._now()

    def copied(self) -> None:
        """Parameter and tensor are copies of others, which agreed; they share no memory yet."""
        self.seen = self._now() if self.own_memory else NOWHERE

    def _now(self) -> int:
        return self.param._version if self.own_memory else self.param.data_ptr()


Masters = bool | torch.dtype
"""Whether and in which type copies of the parameters are stepped: False, at least float32 (True), or exactly this one.
"""


def make_pieces(reducer: GradReducer, master_weights: Masters, first: int = 0) -> list[Piece]:
    """What this rank steps of the parameters from place ``first`` on, in their order.

    Whole parameters, or where ``reducer`` scatters, what this rank's equal share of every bucket holds of them.
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
    """The range ``shard`` of a parameter, flat; or all of it, in its shape."""
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
    """The range of a bucket that belongs to this data-parallel rank."""
    size = bucket.size // context.dp.degree
    return context.dp.rank * size, (context.dp.rank + 1) * size


class Publisher:
    """Brings stepped pieces back into the parameters, gathering them from the other ranks where they are sharded."""

    def __init__(self, reducer: GradReducer, pieces: Sequence[Piece]):
        self._reducer = reducer
        self._pieces = list(pieces)
        self._by_index = {piece.index: piece for piece in pieces}
        self._flat: list[Tensor | None] = [None] * len(reducer.buckets)

    @torch.no_grad()
    def publish(self) -> None:
        """Make every parameter what the optimizers of all ranks have made of it."""
        if not self._reducer.scatter or not self._reducer.communicates:
            for piece in self._pieces:
                if piece.own_memory:
                    piece.param.copy_(piece.tensor.view(piece.param.shape))
                    piece.settled()
            return
        started = [self._start(i, bucket) for i, bucket in enumerate(self._reducer.buckets)]
        for bucket, pending in zip(self._reducer.buckets, started, strict=True):
            flat = pending.wait()
            for slot in bucket.slots:
                self._write_back(slot, flat, shard_of(bucket, self._reducer.context))
        for piece in self._pieces:
            piece.settled()

    def publish_changes(self, changed: bool) -> None:
        """:meth:`publish`, where this rank or, of those that gather from each other, another one has ``changed``."""
        if self._reducer.scatter and self._reducer.communicates:
            flag = torch.tensor([int(changed)], dtype=torch.int32, device=self._reducer.buckets[0].device)
            changed = bool(comm.all_reduce(flag, self._reducer.context, "dp", "max"))
        if changed:
            self.publish()

    def _write_back(self, slot: Slot, flat: Tensor, own: tuple[int, int]) -> None:
        """Copy a parameter out of its bucket, but for what was stepped in the parameter's own memory: ``own``."""
        param, piece = self._reducer.params[slot.index], self._by_index.get(slot.index)
        if piece is None or piece.own_memory:
            param.copy_(flat[slot.start : slot.stop].view(param.shape))
            return
        values = param.detach().view(-1)
        for start, stop in ((slot.start, min(slot.stop, own[0])), (max(slot.start, own[1]), slot.stop)):
            if start < stop:
                values[start - slot.start : stop - slot.start].copy_(flat[start:stop])

    def _start(self, number: int, bucket: Bucket) -> Pending:
        dtype = self._reducer.params[bucket.slots[0].index].dtype
        flat = self._flat[number]
        if flat is None:
            # The gradients' own buffer is free after the step.
            shared = bucket.flat is not None and bucket.flat.dtype == dtype
            flat = bucket.flat if shared else torch.zeros(bucket.size, dtype=dtype, device=bucket.device)
            self._flat[number] = flat
        assert flat is not None
        for slot in bucket.slots:
            piece = self._by_index.get(slot.index)
            if piece is not None:
                at = slot.start + piece.start
                flat[at : at + piece.tensor.numel()].copy_(piece.tensor.reshape(-1))
        return start_all_gather(flat, self._reducer.context, "dp")

    @torch.no_grad()
    def gather(self, values: Sequence[Tensor | None]) -> list[Tensor]:
        """Whole tensors like the parameters, out of what the ranks hold a piece (None is zeros). A collective."""
        found: dict[int, Tensor] = {}
        of_piece = {piece.index: value for piece, value in zip(self._pieces, values, strict=True)}
        if not self._reducer.scatter or not self._reducer.communicates:
            for piece, value in zip(self._pieces, values, strict=True):
                found[piece.index] = torch.zeros_like(piece.tensor) if value is None else value.clone()
            return [found[i].view(param.shape) for i, param in enumerate(self._reducer.params)]
        for bucket in self._reducer.buckets:
            flat = torch.zeros(bucket.size, dtype=bucket.dtype, device=bucket.device)
            for slot in bucket.slots:
                value = of_piece.get(slot.index)
                if value is not None:
                    at = slot.start + self._by_index[slot.index].start
                    flat[at : at + value.numel()].copy_(value.reshape(-1))
            flat = start_all_gather(flat, self._reducer.context, "dp").wait()
            for slot in bucket.slots:
                found[slot.index] = flat[slot.start : slot.stop].view(self._reducer.params[slot.index].shape)
        return [found[i] for i in range(len(self._reducer.params))]
