"""Limits how many jobs run and wait at once, and drops those whose client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from nxd_server.errors import EngineUnavailableError, QueueFullError
from nxd_server.threads import Workers

T = TypeVar("T")


class ConcurrencyLimit:
    """Up to ``width`` jobs run at a time, each in its own thread; ``queue`` more may wait."""

    def __init__(self, what: str, width: int, queue: int):
        self._what = what
        self._most = width + queue
        self._turns = asyncio.Semaphore(width)
        self._workers = Workers(width, "nxd-text")
        self.inside = 0

    async def run(self, work: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
        """Run ``work()``. If this call is cancelled, waiting work is dropped, and ``cancel`` ends running work.

        Raises QueueFullError when there is no room to wait, EngineUnavailableError if no thread can be started.
        """
        if self.inside >= self._most:
            raise QueueFullError(f"{self.inside} {self._what} are being worked on or wait (max_queued_requests)")
        self.inside += 1
        try:
            await self._turns.acquire()
        except BaseException:
            self.inside -= 1
            raise
        try:
            running = self._workers.run(work)
        except BaseException as error:
            self.inside -= 1
            self._turns.release()
            if isinstance(error, RuntimeError):
                raise EngineUnavailableError(f"no thread could be started: {error}", "busy", 1.0) from None
            raise
        running.add_done_callback(self._ended)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            raise

    def _ended(self, work: asyncio.Future[Any]) -> None:
        """Free the turn when the work ends, not when its caller stops waiting."""
        self.inside -= 1
        self._turns.release()
        if not work.cancelled():
            work.exception()  # mark it retrieved, even if nobody waits
