"""The inbox of an engine's thread: requests and cancellations from callers, and the requests' deadlines."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from nxd_server.engine.deadlines import Deadlines
from nxd_server.engine.request import Choice, Ticket


class Inbox:
    """Filled by callers, emptied by the engine's thread; ``lock`` is the engine's."""

    def __init__(self, lock: threading.Condition, clock: Callable[[], float]):
        """``clock`` times the requests' timeouts."""
        self.arrivals: deque[Choice] = deque()
        self.waiting_tokens = 0
        """Tokens of prompts that have no slot yet."""
        self._lock = lock
        self._cancels: deque[Ticket] = deque()
        self._deadlines = Deadlines(clock)
        self.wait_seconds = self._deadlines.wait_seconds

    def put(self, ticket: Ticket) -> None:
        """Add all choices of a request; call with the lock held."""
        self.waiting_tokens += sum(len(choice.prompt) for choice in ticket.choices)
        self.arrivals.extend(ticket.choices)
        self._deadlines.add(ticket)
        self._lock.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Request the end of a ticket's unfinished choices. Thread-safe."""
        with self._lock:
            self._cancels.append(ticket)
            self._lock.notify_all()

    def not_waiting(self, choice: Choice) -> None:
        """Record that a choice's prompt has a slot, or has ended without one."""
        with self._lock:
            self.waiting_tokens -= len(choice.prompt)

    @property
    def has_news(self) -> bool:
        """Whether callers have left anything."""
        return bool(self.arrivals or self._cancels)

    @property
    def due(self) -> bool:
        """Whether :meth:`take` may return something. Needs no lock, because it only reads."""
        return bool(self.arrivals or self._cancels or self._deadlines.due)

    def take(self) -> tuple[list[Choice], list[Ticket], list[Ticket]]:
        """Return new choices, cancelled tickets, and late tickets, each once."""
        with self._lock:
            arrivals, cancels = list(self.arrivals), list(self._cancels)
            self.arrivals.clear()
            self._cancels.clear()
            return arrivals, cancels, self._deadlines.take_late()

    def empty(self) -> list[Choice]:
        """Return new choices and drop cancellations and deadlines, because everything is ending."""
        with self._lock:
            arrivals = list(self.arrivals)
            self.arrivals.clear()
            self._cancels.clear()
            self._deadlines.clear()
        return arrivals
