"""What callers leave for an engine's thread: requests, cancellations, and the deadlines of both."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from nxd_server.engine.deadlines import Deadlines
from nxd_server.engine.request import Choice, Ticket


class Inbox:
    """Filled by callers, emptied by the engine's thread; ``lock`` is the engine's."""

    def __init__(self, lock: threading.Condition, clock: Callable[[], float]):
        """``clock``: of the requests' timeouts."""
        self.arrivals: deque[Choice] = deque()
        self.waiting_tokens = 0
        """Of prompts that have no slot yet."""
        self._lock = lock
        self._cancels: deque[Ticket] = deque()
        self._deadlines = Deadlines(clock)
        self.wait_seconds = self._deadlines.wait_seconds

    def put(self, ticket: Ticket) -> None:
        """Leave all choices of a request; called under the lock."""
        self.waiting_tokens += sum(len(choice.prompt) for choice in ticket.choices)
        self.arrivals.extend(ticket.choices)
        self._deadlines.add(ticket)
        self._lock.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Have what is left of a request end. From any thread."""
        with self._lock:
            self._cancels.append(ticket)
            self._lock.notify_all()

    def not_waiting(self, choice: Choice) -> None:
        """Its prompt has a slot, or has ended without one."""
        with self._lock:
            self.waiting_tokens -= len(choice.prompt)

    @property
    def has_news(self) -> bool:
        """Whether callers left something."""
        return bool(self.arrivals or self._cancels)

    @property
    def due(self) -> bool:
        """Whether :meth:`take` may have something. Needs no lock: it only looks."""
        return bool(self.arrivals or self._cancels or self._deadlines.due)

    def take(self) -> tuple[list[Choice], list[Ticket], list[Ticket]]:
        """New choices, tickets that were cancelled, and tickets that are late, each once."""
        with self._lock:
            arrivals, cancels = list(self.arrivals), list(self._cancels)
            self.arrivals.clear()
            self._cancels.clear()
            return arrivals, cancels, self._deadlines.take_late()

    def empty(self) -> list[Choice]:
        """New choices; cancellations and deadlines are forgotten, as everything ends."""
        with self._lock:
            arrivals = list(self.arrivals)
            self.arrivals.clear()
            self._cancels.clear()
            self._deadlines.clear()
        return arrivals
