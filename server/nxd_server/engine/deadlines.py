"""Tickets ordered by their deadlines. Not thread-safe: call with the engine's lock held."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable

from nxd_server.engine.request import Ticket


class Deadlines:
    """The deadlines of unfinished tickets; finished ones are dropped lazily."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Ticket]] = []
        self._numbers = itertools.count()
        self._limit = 64

    def add(self, ticket: Ticket) -> None:
        if ticket.timeout is None:
            return
        if len(self._heap) > self._limit:  # most of them belong to finished requests
            self._heap = [entry for entry in self._heap if not entry[2].done]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64
        heapq.heappush(self._heap, (self._clock() + ticket.timeout, next(self._numbers), ticket))

    def wait_seconds(self) -> float:
        """Seconds until the next deadline."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else math.inf

    @property
    def due(self) -> bool:
        """Whether :meth:`take_late` may return a ticket. Needs no lock, because it only reads."""
        heap = self._heap
        return bool(heap) and (heap[0][0] <= self._clock() or heap[0][2].done)

    def take_late(self) -> list[Ticket]:
        """Return the tickets whose deadline has passed, each once."""
        now, late = self._clock(), []
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].done):
            late.append(heapq.heappop(self._heap)[2])
        return late

    def clear(self) -> None:
        self._heap.clear()
