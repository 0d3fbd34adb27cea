"""Who is let into an engine, how many are inside, and how they ended."""

from __future__ import annotations

import math
import threading
from collections import Counter

from nxd_server.errors import QueueFullError, RequestError


class Admission:
    """The queue of one engine as its callers meet it. ``_wake`` is the engine's one lock."""

    def __init__(self, max_queued_requests: int, capacity: int):
        """``capacity``: requests that fit without queueing."""
        self.max_queued_requests = max_queued_requests
        self.capacity = capacity
        self._wake = threading.Condition()
        self._inside = 0
        """Requests taken and not finished; only changed under the lock."""
        self._untold = 0
        """Requests whose callers have not been told their end yet: what a drain waits for."""
        self._submitted = 0
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._request_seconds = 0.0
        """A moving average of how long one request takes."""

    @staticmethod
    def _check_timeout(timeout: float | None) -> None:
        if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
            raise RequestError("timeout", f"must be a positive number of seconds, got {timeout}")

    def _check_queue(self, requests: int) -> None:
        """A request is refused when it would wait behind ``max_queued_requests`` others; free capacity counts."""
        limit = self.capacity + self.max_queued_requests
        if self._inside + requests <= limit:
            return
        self._rejected["queue_full"] += 1
        waiting = max(0, self._inside - self.capacity)
        raise QueueFullError(
            f"{waiting} requests are waiting and at most {self.max_queued_requests} may; try again later",
            self._retry_after(waiting),
        )

    def _retry_after(self, waiting: int) -> float:
        seconds = self._request_seconds * (waiting + 1) / max(1, self.capacity)
        return min(60.0, max(1.0, seconds))

    def _book_end(self, outcome: str, seconds: float) -> None:
        """Count one finished request; call it before its caller is told."""
        self._finished[outcome] += 1
        if outcome in ("stop", "length", "done"):
            known = self._request_seconds
            self._request_seconds = seconds if known == 0.0 else known + 0.1 * (seconds - known)
        with self._wake:
            self._inside -= 1

    def _book_told(self) -> None:
        """The caller of a finished request has been told."""
        with self._wake:
            self._untold -= 1
            self._wake.notify_all()

    def _book_taken(self, requests: int) -> None:
        """Count requests that were taken in; called under the lock."""
        self._inside += requests
        self._untold += requests
        self._submitted += requests
