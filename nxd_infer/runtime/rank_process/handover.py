"""How pipeline stages follow one another: a rank begins a step when the rank in its place of the stage before is done.

Each pair of such ranks shares an eventfd that counts finished steps. Every rank runs all steps in the same order, so a
count is enough. What is handed on is in the arena by then (``ipc/arena.py``). Nothing flows back: a side of the arena
is used again only after all ranks have finished the step there.
"""

from __future__ import annotations

import os
import select
import time

from nxd_infer.errors import CollectiveTimeoutError
from nxd_infer.runtime.ipc.channel import AWAKE_SECONDS

FLAGS = os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE


class Handover:
    """One rank's place in the order of the stages; ``after`` and ``before`` as in RankConfig."""

    def __init__(self, after: int | None, before: int | None, timeout: float):
        """``timeout``: seconds to wait for the stage before."""
        self._after, self._before, self._timeout = after, before, timeout
        self._poll = select.poll()
        if after is not None:
            self._poll.register(after, select.POLLIN)

    def wait(self) -> int:
        """Wait until the stage before has finished its next step; return the nanoseconds that it took.

        Polls for a moment before it sleeps, like a rank that waits for a request. Raises CollectiveTimeoutError.
        """
        if self._after is None:
            return 0
        started = time.monotonic_ns()
        awake = time.monotonic() + AWAKE_SECONDS
        while not (ready := self._poll.poll(0)) and time.monotonic() < awake:
            os.sched_yield()
        if not ready and not self._poll.poll(self._timeout * 1000):
            raise CollectiveTimeoutError(f"the pipeline stage before has not finished its step in {self._timeout:g} s")
        os.eventfd_read(self._after)
        return time.monotonic_ns() - started

    def done(self) -> None:
        """Let the next stage begin the step that this rank has finished."""
        if self._before is not None:
            os.eventfd_write(self._before, 1)
