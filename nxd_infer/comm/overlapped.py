"""Collectives that overlap with computation: ``start_...`` returns at once, ``Pending.wait()`` returns the result.

They take flat tensors that must not be touched in between, and overlap on axes over a process group; with shared memory
and other transports the collective has finished when ``start_...`` returns. Every rank of the axis must start the same
collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_infer.comm.distributed import DistributedCollectives, as_bytes
from nxd_infer.comm.protocol import collectives_of
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError


class Pending:
    """A collective in flight."""

    def __init__(self, wait: Callable[[], Tensor]):
        self._wait: Callable[[], Tensor] | None = wait
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        """Return the result; the first call waits for it. Raises CollectiveTimeoutError if a peer is missing."""
        if self._result is None:
            assert self._wait is not None
            self._result, self._wait = self._wait(), None
        return self._result


def start_all_reduce(x: Tensor, context: ParallelContext, axis: str) -> Pending:
    """Sum flat ``x`` over the axis, in place if the transport can."""
    if context.axis(axis).degree == 1:
        return Pending(lambda: x)
    transport = collectives_of(context)
    if not isinstance(transport, DistributedCollectives) or transport.shared(axis, x) is not None:
        done = transport.all_reduce(x, axis)
        return Pending(lambda: done)
    return _started(transport, "all_reduce", axis, lambda group: dist.all_reduce(x, group=group, async_op=True), x)


def start_reduce_scatter(x: Tensor, context: ParallelContext, axis: str) -> Pending:
    """Sum flat ``x`` over the axis; this rank gets its equal piece as a new tensor."""
    here = context.axis(axis)
    if here.degree == 1:
        return Pending(lambda: x)
    _require_pieces(x, here.degree)
    transport = collectives_of(context)
    if not isinstance(transport, DistributedCollectives) or transport.shared(axis, x) is not None:
        done = transport.reduce_scatter(x, axis, 0)
        return Pending(lambda: done)
    if transport.backend(axis) != "gloo":
        piece = x.new_empty(x.numel() // here.degree)
        return _started(
            transport,
            "reduce_scatter",
            axis,
            lambda group: dist.reduce_scatter_tensor(piece, x, group=group, async_op=True),
            piece,
        )
    # gloo's reduce-scatter is slower than its all-reduce; this moves half the bytes, and sums in rank order.
    received = torch.empty_like(x)
    pending = _started(
        transport,
        "reduce_scatter",
        axis,
        lambda group: dist.all_to_all_single(received, x, group=group, async_op=True),
        received,
    )
    return Pending(lambda: pending.wait().view(here.degree, -1).sum(0))


def start_all_gather(x: Tensor, context: ParallelContext, axis: str) -> Pending:
    """Gather flat ``x``, of which each rank has filled its equal piece, in place if the transport can."""
    here = context.axis(axis)
    if here.degree == 1:
        return Pending(lambda: x)
    _require_pieces(x, here.degree)
    transport = collectives_of(context)
    pieces = x.chunk(here.degree)
    if not isinstance(transport, DistributedCollectives) or transport.shared(axis, x) is not None:
        done = transport.all_gather(pieces[here.rank], axis, 0)
        return Pending(lambda: done)
    if transport.backend(axis) != "gloo":
        return _started(
            transport,
            "all_gather",
            axis,
            lambda group: dist.all_gather_into_tensor(x, pieces[here.rank].clone(), group=group, async_op=True),
            x,
        )
    # gloo's all-gather copies through lists; broadcasts write directly to the target.
    each = [
        _started(
            transport,
            "all_gather",
            axis,
            lambda group, p=piece, src=src: dist.broadcast(p, src, group=group, async_op=True),
            piece,
        )
        for piece, src in zip((piece.view(torch.uint8) for piece in pieces), here.ranks, strict=True)
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
