"""Limits the number of connections, and gives each a deadline for the data that its client owes.

An idle connection costs a file descriptor, and a server without descriptors can answer nobody and start no rank.
So there are fewer connections than descriptors. If all are taken, the connection that has owed the server the head of
a request, or the next piece of a body, for the longest time is closed for the next one; sending a byte now and then
does not help. If all of them are being answered, a few more are accepted, only for the health routes.
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
"""For the health routes, files, restarted ranks, and connections that are accepted but not counted yet."""
MOST_BY_DEFAULT = 4096
"""All connections are looked at several times a second, and a machine may allow a million descriptors."""
HEALTH_CONNECTIONS = 8
FEWEST = 16
SWEEP_SECONDS = 0.25
BODY_PIECE = 2**14
"""In bytes; a client must send this much of a body per ``connection_timeout``, or its end; and read as much."""
BACKLOG = 8
"""Connections accepted per turn of the event loop; with more, many would be open before the first is counted."""


class Connection(Protocol):
    """A connection, as implemented by the HTTP protocol (``h11_protocol``)."""

    address: str
    since: float
    """Start of the current debt of the client, on the loop's clock."""
    head_due: float | None
    """When the head of a request must be complete; None if none has begun."""
    closing: tuple[int, float] | None
    """While closing: the bytes not taken by the client at some time, since when it has taken no piece of them."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def conn(self) -> h11.Connection: ...

    @property
    def owes(self) -> bool:
        """Whether the server waits for the client to send something."""
        ...

    @property
    def left(self) -> bool:
        """Whether the client has closed a connection of which nothing is read now."""
        ...

    def is_late(self, now: float) -> bool:
        """Return whether the client still has to read an answer whose time is up."""
        ...

    def crowd(self) -> None:
        """Serve only the health routes here, because there are too many connections."""
        ...

    def unread(self) -> int:
        """Return the number of bytes that the client has not taken."""
        ...


def reads(before: int, left: int) -> bool:
    """Whether a client that had ``before`` bytes to read has read a piece of them, or all."""
    return left <= max(0, before - BODY_PIECE)


def most_connections(setting: int | None, in_use: int | None = None) -> int:
    """Return the connection limit: ``setting``, but at most what the process's descriptors allow."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if in_use is None:
        in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
    room = 2**20 if limit == resource.RLIM_INFINITY else limit - in_use - KEPT_DESCRIPTORS
    return max(FEWEST, min(MOST_BY_DEFAULT if setting is None else setting, room))


class Connections:
    """The connections of one server. Used only by the event loop's thread."""

    def __init__(self, settings: ServerSettings):
        self.header_timeout = settings.header_timeout
        self.silence = settings.connection_timeout
        self.longest = settings.request_timeout + settings.connection_timeout
        """Seconds until an answer must have been read."""
        self.most = most_connections(settings.max_connections)
        self._per_address = settings.max_connections_per_address
        self._all: dict[Connection, None] = {}
        """Ordered by the age of their debt, the oldest first."""
        self._by_address: Counter[str] = Counter()
        self.closed: Counter[str] = Counter(dict.fromkeys(("late", "silent", "evicted", "refused"), 0))
        """Number of connections that the server ended, by reason."""

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: Connection) -> bool:
        """Register a new connection; False if there is no room for it at all."""
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
        """Start a new debt of the client: a head, a body or its next piece."""
        connection.since = connection.loop.time()
        if connection in self._all:
            del self._all[connection]
            self._all[connection] = None

    def leave(self, connection: Connection) -> None:
        """Unregister a connection that was closed; no effect if it is not registered."""
        if connection in self._all:
            del self._all[connection]
            self._by_address[connection.address] -= 1
            if not self._by_address[connection.address]:
                del self._by_address[connection.address]

    def _evict(self) -> bool:
        """End the connection with the oldest debt; False if none owes anything."""
        oldest = next((connection for connection in self._all if connection.owes), None)
        if oldest is None:
            return False
        self.end(oldest, "evicted")
        return True

    def end(self, connection: Connection, reason: str) -> None:
        self.closed[reason] += 1
        self.leave(connection)  # immediately, because its descriptor will be free in a moment
        connection.transport.abort()

    def sweep(self, now: float) -> None:
        """End the connections that have passed a deadline."""
        for connection in list(self._all):
            if connection.transport.is_closing():
                left = connection.unread()
                if connection.closing is None or reads(connection.closing[0], left):
                    connection.closing = left, now
                elif now - connection.closing[1] > self.silence:  # the client does not read its last answer
                    self.end(connection, "silent")
            elif connection.is_late(now):
                self.end(connection, "silent")
            elif connection.left:
                connection.transport.abort()
            elif connection.head_due is not None and now > connection.head_due:
                self.end(connection, "late")
            elif connection.conn.their_state is h11.SEND_BODY and now - connection.since > self.silence:
                self.end(connection, "silent")

    async def watch(self) -> None:
        """Call :meth:`sweep` periodically until cancelled."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(SWEEP_SECONDS)
                self.sweep(loop.time())
