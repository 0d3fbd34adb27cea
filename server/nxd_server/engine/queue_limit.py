"""Who is let into an engine, how many are inside, and how they ended."""

from __future__ import annotations

import math
import threading
from collections import Counter

from nxd_server.errors import QueueFullError, RequestError


def check_timeout(timeout: float | None) -> None:
    """RequestError for a ``timeout`` that is no positive number of seconds."""
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise RequestError("timeout", f"must be a positive number of seconds, got {timeout}")


class QueueLimit:
    """Counts the requests of one engine, and refuses those that would wait behind too many."""

    def __init__(self, lock: threading.Condition, max_queued_requests: int, capacity: int):
        """``lock`` is the engine's; ``capacity``: requests that fit without queueing."""
        self.max_queued_requests = max_queued_requests
        self.capacity = capacity
        self.draining = False
        """Nobody new is let in."""
        self.inside = 0
        """Requests taken and not finished; only changed under the lock."""
        self.untold = 0
        """Requests whose callers have not been told their end yet: what a drain waits for."""
        self.submitted = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        """By reason: ``queue_full``, ``unavailable``, ``invalid``."""
        self._lock = lock
        self._request_seconds = 0.0
        """A moving average of how long one request takes."""

    def check(self, requests: int) -> None:
        """A request is refused when it would wait behind ``max_queued_requests`` others; free capacity counts."""
        limit = self.capacity + self.max_queued_requests
        if self.inside + requests <= limit:
            return
        waiting = max(0, self.inside - self.capacity)
        raise self.full(
            f"{waiting} requests are waiting and at most {self.max_queued_requests} may; try again later", waiting
        )

    def full(self, message: str, waiting: int) -> QueueFullError:
        """The refusal, counted, of a request that ``waiting`` others wait before."""
        self.rejected["queue_full"] += 1
        seconds = self._request_seconds * (waiting + 1) / max(1, self.capacity)
        return QueueFullError(message, min(60.0, max(1.0, seconds)))

    def taken(self, requests: int) -> None:
        """Count requests that were taken in; called under the lock."""
        self.inside += requests
        self.untold += requests
        self.submitted += requests

    def ended(self, outcome: str, seconds: float) -> None:
        """Count one finished request; call it before its caller is told."""
        self.finished[outcome] += 1
        if outcome in ("stop", "length", "done"):
            known = self._request_seconds
            self._request_seconds = seconds if known == 0.0 else known + 0.1 * (seconds - known)
        with self._lock:
            self.inside -= 1

    def told(self) -> None:
        """The caller of a finished request has been told."""
        with self._lock:
            self.untold -= 1
            self._lock.notify_all()
