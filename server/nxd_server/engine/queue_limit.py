"""Admission to an engine: which requests are accepted, how many are inside, and how they ended."""

from __future__ import annotations

import math
import threading
from collections import Counter

from nxd_server.errors import QueueFullError, RequestError


def check_timeout(timeout: float | None) -> None:
    """Raise RequestError unless ``timeout`` is None or a positive number of seconds."""
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise RequestError("timeout", f"must be a positive number of seconds, got {timeout}")


class QueueLimit:
    """Counts the requests of one engine, and rejects those that would wait behind too many."""

    def __init__(self, lock: threading.Condition, max_queued_requests: int, capacity: int):
        """``lock`` is the engine's; ``capacity``: requests that fit without queueing."""
        self.max_queued_requests = max_queued_requests
        self.capacity = capacity
        self.draining = False
        """Whether new requests are rejected."""
        self.inside = 0
        """Accepted and unfinished requests; only changed with the lock held."""
        self.unreported = 0
        """Requests whose end has not been reported to the caller yet; a drain waits for them."""
        self.submitted = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        """By reason: ``queue_full``, ``unavailable``, ``invalid``."""
        self._lock = lock
        self._request_seconds = 0.0
        """A moving average of the time per request."""

    def check(self, requests: int) -> None:
        """Raise QueueFullError if ``requests`` would wait behind too many others; free capacity counts."""
        limit = self.capacity + self.max_queued_requests
        if self.inside + requests <= limit:
            return
        waiting = max(0, self.inside - self.capacity)
        raise self.full(
            f"{waiting} requests are waiting and at most {self.max_queued_requests} may; try again later", waiting
        )

    def full(self, message: str, waiting: int) -> QueueFullError:
        """Count and return the error of a request with ``waiting`` others ahead of it."""
        self.rejected["queue_full"] += 1
        seconds = self._request_seconds * (waiting + 1) / max(1, self.capacity)
        return QueueFullError(message, min(60.0, max(1.0, seconds)))

    def taken(self, requests: int) -> None:
        """Count accepted requests; call with the lock held."""
        self.inside += requests
        self.unreported += requests
        self.submitted += requests

    def ended(self, outcome: str, seconds: float) -> None:
        """Count one finished request; call it before reporting the end to its caller."""
        self.finished[outcome] += 1
        if outcome in ("stop", "length", "done"):
            known = self._request_seconds
            self._request_seconds = seconds if known == 0.0 else known + 0.1 * (seconds - known)
        with self._lock:
            self.inside -= 1

    def reported(self) -> None:
        """Record that the end of a request has been reported to its caller."""
        with self._lock:
            self.unreported -= 1
            self._lock.notify_all()
