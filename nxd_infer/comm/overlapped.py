"""Collectives that overlap with computation: ``start_...`` returns at once, ``Pending.wait()`` returns the result.

They take flat tensors that must not be touched in between, and overlap on axes over a process group; with shared memory
and other transports the collective has finished when ``start_...`` returns. Every rank of the axis must start the same
collectives in the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_infer.comm.distributed import DistributedCollectives, as_bytes
from nxd_infer.comm.protocol import Collectives, collectives_of
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError


class Pending:
    """A collective in flight."""

    def __init__(self, wait: Callable[[], Tensor]):
        self._wait: Callable[[], Tensor] | None = wait
        """None once it has ended: what it refers to keeps gloo's connections open."""
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result; the first call waits for it. Raises CollectiveTimeoutError if a peer is missing."""
        if self._result is None:
            assert self._wait is not None
            self._result, self._wait = self._wait(), None
        return self._result


def _done(x: Tensor) -> Pending:
    return Pending(lambda: x)


def _overlapping(transport: Collectives, axis: str, x: Tensor) -> TypeGuard[DistributedCollectives]:
    """Return whether collectives of ``x`` run beside a computation, over a process group."""
    return isinstance(transport, DistributedCollectives) and transport.shared(axis, x) is None


def start_all_reduce(x: Tensor, context: ParallelContext, axis: str) -> Pending:
    """Sum flat ``x`` over the axis, in place if the transport can."""
    if context.axis(axis).degree == 1:
        return _done(x)
    transport = collectives_of(context)
    if not _overlapping(transport, axis, x):
        return _done(transport.all_reduce(x, axis))
    return _started(transport, "all_reduce", axis, lambda group: dist.all_reduce(x, group=group, async_op=True), x)


def start_reduce_scatter(x: Tensor, context: ParallelContext, axis: str) -> Pending:
    """Sum flat ``x`` over the axis; this rank gets its equal piece as a new tensor."""
    here = context.axis(axis)
    if here.degree == 1:
        return _done(x)
    _require_pieces(x, here.degree)
    transport = collectives_of(context)
    if not _overlapping(transport, axis, x):
        return _done(transport.reduce_scatter(x, axis, 0))
    if transport.backend(axis) != "gloo":
        piece = x.new_empty(x.numel() // here.degree)

        def scatter(group: dist.ProcessGroup) -> dist.Work | None:
            return dist.reduce_scatter_tensor(piece, x, group=group, async_op=True)

        return _started(transport, "reduce_scatter", axis, scatter, piece)
    # gloo's reduce-scatter is slower than its all-reduce; this moves half the bytes, and sums in rank order.
    received = torch.empty_like(x)

    def exchange(group: dist.ProcessGroup) -> dist.Work | None:
        return dist.all_to_all_single(received, x, group=group, async_op=True)

    pending = _started(transport, "reduce_scatter", axis, exchange, received)
    return Pending(lambda: pending.wait().view(here.degree, -1).sum(0))


def start_all_gather(x: Tensor, context: ParallelContext, axis: str) -> Pending:
    """Gather flat ``x``, of which each rank has filled its equal piece, in place if the transport can."""
    here = context.axis(axis)
    if here.degree == 1:
        return _done(x)
    _require_pieces(x, here.degree)
    transport = collectives_of(context)
    pieces = x.chunk(here.degree)
    if not _overlapping(transport, axis, x):
        return _done(transport.all_gather(pieces[here.rank], axis, 0))
    if transport.backend(axis) != "gloo":
        own = pieces[here.rank].clone()

        def gather(group: dist.ProcessGroup) -> dist.Work | None:
            return dist.all_gather_into_tensor(x, own, group=group, async_op=True)

        return _started(transport, "all_gather", axis, gather, x)

    # gloo's all-gather copies through lists; broadcasts write directly to the target.
    def spread(group: dist.ProcessGroup, src: int, piece: Tensor) -> dist.Work | None:
        return dist.broadcast(piece.view(torch.uint8), src, group=group, async_op=True)

    each = [
        _started(transport, "all_gather", axis, functools.partial(spread, src=src, piece=piece), piece)
        for src, piece in zip(here.ranks, pieces, strict=True)
    ]

    def wait() -> Tensor:
        for pending in each:
            pending.wait()
        return x

    return Pending(wait)


def _started(
    transport: DistributedCollectives,
    what: str,
    axis: str,
    action: Callable[[dist.ProcessGroup], dist.Work | None],
    result: Tensor,
) -> Pending:
    work: list[dist.Work | None] = []
    transport.run(what, axis, lambda group: work.append(action(group)))

    def wait() -> Tensor:
        if work[0] is not None:
            transport.run(what, axis, lambda group: work[0].wait())  # pyright: ignore[reportOptionalMemberAccess]
        return result

    return Pending(wait)


def _require_pieces(x: Tensor, degree: int) -> None:
    if x.dim() != 1 or x.numel() % degree:
        raise CollectiveError(f"x must be a flat tensor that divides by {degree} ranks, got shape {tuple(x.shape)}")


def start_send(x: Tensor, context: ParallelContext, axis: str, dst: int, tag: int) -> Pending:
    """Send ``x`` to the ``dst``-th rank of the axis. Messages of one tag arrive in order; tags do not wait for each
    other. ``x`` must not change before ``wait()``."""
    transport, target = _point_to_point(context), context.axis(axis).ranks[dst]
    flat = as_bytes(x)
    return _started(transport, "send", axis, lambda group: dist.isend(flat, target, group=group, tag=tag), x)


def start_recv(x: Tensor, context: ParallelContext, axis: str, src: int, tag: int) -> Pending:
    """Receive into contiguous ``x`` from the ``src``-th rank of the axis; see :func:`start_send`."""
    transport, source = _point_to_point(context), context.axis(axis).ranks[src]
    flat = as_bytes(x)
    return _started(transport, "recv", axis, lambda group: dist.irecv(flat, source, group=group, tag=tag), x)


def _point_to_point(context: ParallelContext) -> DistributedCollectives:
    transport = collectives_of(context)
    if not isinstance(transport, DistributedCollectives):
        raise CollectiveError(
            f"{type(transport).__name__} has no messages between two ranks that overlap with computation; pipelines "
            "need a process group: call torch.distributed.init_process_group() first"
        )
    return transport
