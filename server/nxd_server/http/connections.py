"""Which connections are kept: so many at most, each with a deadline for what it owes.

A connection that sends nothing costs a descriptor, and a server without descriptors answers nobody and starts no rank.
So there are fewer connections than descriptors. Where they are all taken, the one that has owed the server the head of
a request, or the next piece of a body, for the longest time makes room for the next: to send a byte now and then pays
nothing. Where every one of them is being answered, a few more are let in, for the health routes alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections import Counter
from typing import Protocol

import h11

from nxd_server.settings import ServerSettings

KEPT_DESCRIPTORS = 64
"""For the health routes, files, ranks that are started again, and connections between their accept and their count."""
HEALTH_CONNECTIONS = 8
FEWEST = 16
SWEEP_SECONDS = 0.25
BODY_PIECE = 2**14
"""Bytes; a body owes so many within ``connection_timeout``, and as many again after these, or its end."""
BACKLOG = 8
"""Connections accepted in one turn of the loop; more would be here before the first of them is counted."""


class Connection(Protocol):
    """A connection, as the HTTP protocol has it (``h11_protocol``)."""

    address: str
    since: float
    """Since when the client owes what it owes, on the loop's clock."""
    head_due: float | None
    """When the head of a request must be complete; None while none has begun."""
    closing: tuple[int, float] | None
    """Bytes that a connection which is being closed has not taken, and since when it takes none."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def conn(self) -> h11.Connection: ...

    @property
    def owes(self) -> bool:
        """Whether the client has to send something before the server has something to do."""
        ...

    def crowd(self) -> None:
        """Serve the health routes alone here: there are more connections than there is room for."""
        ...

    def unread(self) -> int:
        """Bytes that the client's side has not taken."""
        ...


def most_connections(setting: int | None, in_use: int | None = None) -> int:
    """How many the process's limit of descriptors leaves room for, and ``setting`` allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if in_use is None:
        in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
    room = 2**20 if limit == resource.RLIM_INFINITY else limit - in_use - KEPT_DESCRIPTORS
    return max(FEWEST, room if setting is None else min(setting, room))


class Connections:
    """The connections of one server. Used by the loop's thread alone."""

    def __init__(self, settings: ServerSettings):
        self.header_timeout = settings.header_timeout
        self.silence = settings.connection_timeout
        self.most = most_connections(settings.max_connections)
        self._per_address = settings.max_connections_per_address
        self._all: dict[Connection, None] = {}
        """The one whose debt is the oldest comes first."""
        self._by_address: Counter[str] = Counter()
        self.closed: Counter[str] = Counter(dict.fromkeys(("late", "silent", "evicted", "refused"), 0))
        """How many were ended, by why."""

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Connection) -> bool:
        """Count a new connection in; False where there is no room for it at all."""
        address = connection.address
        if self._per_address is not None and self._by_address[address] >= self._per_address:
            self.closed["refused"] += 1
            return False
        if len(self._all) >= self.most and not self._evict():
            if len(self._all) >= self.most + HEALTH_CONNECTIONS:
                self.closed["refused"] += 1
                return False
            connection.crowd()
        self._all[connection] = None
        self._by_address[address] += 1
        return True

    def due(self, connection: Connection) -> None:
        """From now on the client owes something else: a head, a body or the next piece of it."""
        connection.since = connection.loop.time()
        if connection in self._all:
            del self._all[connection]
            self._all[connection] = None

    def leave(self, connection: Connection) -> None:
        """The connection is closed, or was ended; harmless when it was never in."""
        if connection in self._all:
            del self._all[connection]
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def _evict(self) -> bool:
        """End the one that has owed something for the longest time; False when none does."""
        oldest = next((connection for connection in self._all if connection.owes), None)
        if oldest is None:
            return False
        self.end(oldest, "evicted")
        return True

    def end(self, connection: Connection, reason: str) -> None:
        self.closed[reason] += 1
        self.leave(connection)  # at once: its descriptor is free in a moment
        connection.transport.abort()

    def sweep(self, now: float) -> None:
        """End those that are over a deadline."""
        for connection in list(self._all):
            if connection.transport.is_closing():
                left = connection.unread()
                if connection.closing is None or left < connection.closing[0]:
                    connection.closing = left, now
                elif now - connection.closing[1] > self.silence:  # its last answer is not taken
                    self.end(connection, "silent")
            elif connection.head_due is not None and now > connection.head_due:
                self.end(connection, "late")
            elif connection.conn.their_state is h11.SEND_BODY and now - connection.since > self.silence:
                self.end(connection, "silent")

    async def watch(self) -> None:
        """Sweep until cancelled."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                self.sweep(loop.time())
