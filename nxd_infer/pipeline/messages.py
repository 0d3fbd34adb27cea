"""Messages between pipeline ranks: over gloo as they come, over any other transport in lock step.

In *lock step* all ranks of the pipeline exchange what they have for each other between two passes, by gathering it. A
transport needs no messages between two ranks for that, but a pass waits until the longest of the same tick has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nxd_infer.comm.distributed import DistributedCollectives, as_bytes
from nxd_infer.comm.overlapped import Pending, start_recv, start_send
from nxd_infer.comm.protocol import collectives_of
from nxd_infer.comm.texts import gather_bytes
from nxd_infer.context import ParallelContext
from nxd_infer.errors import CollectiveError
from nxd_infer.pipeline.schedule import Action, timetable


def messages_for(context: ParallelContext, actions: Sequence[Sequence[Action]], stages: int) -> PointToPoint:
    """Return what the transport of ``context`` can do. ``actions``: of all ranks."""
    if context.pp.degree == 1:
        return PointToPoint(context)
    transport = collectives_of(context)
    # Other process groups (NCCL) ignore tags: messages would be taken for others.
    tagged = isinstance(transport, DistributedCollectives) and transport.backend("pp") == "gloo"
    return PointToPoint(context) if tagged else StepMessages(context, actions, stages)


class PointToPoint:
    """Messages between pipeline ranks that overlap with the passes. A tag names one message of a step."""

    def __init__(self, context: ParallelContext):
        self.context = context

    def send(self, x: Tensor, dst: int, tag: int) -> Pending:
        """Begin to send contiguous ``x``, which must not change before ``wait()``."""
        return start_send(x, self.context, "pp", dst, tag)

    def recv(self, x: Tensor, src: int, tag: int) -> Pending:
        """Begin to receive into contiguous ``x``."""
        return start_recv(x, self.context, "pp", src, tag)

    def before(self, number: int) -> None:
        """Called before pass ``number`` of this rank, and with their count after the last one."""


class StepMessages(PointToPoint):
    """Messages that are exchanged between the ticks of the schedule, a pass being one tick."""

    def __init__(self, context: ParallelContext, actions: Sequence[Sequence[Action]], stages: int):
        super().__init__(context)
        parts = 2 if any(action.late for mine in actions for action in mine) else 1
        table = timetable(actions, [1] * stages, [parts] * stages)  # each part is a pass
        self._starts = [round(span.start) for span in table[context.pp.rank]]
        # After the last pass come the gradients of weights that were lent.
        self._starts.append(max(round(span.end) for spans in table for span in spans))
        self._done = -1
        """Exchanges so far, less one: weights are lent before the first tick."""
        self._out: list[tuple[int, int, Tensor]] = []
        self._in: dict[tuple[int, int], Tensor] = {}

    def send(self, x: Tensor, dst: int, tag: int) -> Pending:
        self._out.append((dst, tag, x))
        return Pending(lambda: x)

    def recv(self, x: Tensor, src: int, tag: int) -> Pending:
        def take() -> Tensor:
            if (src, tag) not in self._in:
                raise CollectiveError(f"a message of pipeline rank {src} is not there in the tick that needs it")
            as_bytes(x).copy_(self._in.pop((src, tag)))
            return x

        return Pending(take)

    def before(self, number: int) -> None:
        while self._done < self._starts[number]:
            self._exchange()
            self._done += 1

    def _exchange(self) -> None:
        """Give every rank what the others have for it: a table of (rank, tag, bytes), then the bytes."""
        parts = [as_bytes(x).cpu() for _, _, x in self._out]
        table = [(dst, tag, len(part)) for (dst, tag, _), part in zip(self._out, parts, strict=True)]
        head = torch.tensor([len(table), *(number for row in table for number in row)], dtype=torch.int64)
        self._out.clear()
        whole = gather_bytes(torch.cat([head.view(torch.uint8), *parts]), self.context, "pp")
        for src, data in enumerate(whole):
            count = int(data[:8].view(torch.int64)) if src != self.context.pp.rank else 0
            at = 8 + 24 * count
            for dst, tag, size in data[8:at].view(torch.int64).view(count, 3).tolist():
                if dst == self.context.pp.rank:
                    self._in[src, tag] = data[at : at + size]
                at += size
