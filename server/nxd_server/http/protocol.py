"""uvicorn's HTTP/1.1 protocol with a limit of connections, deadlines for slow clients, and JSON errors.

A body's deadlines are in ``request_body``, and a client that reads nothing of its answer is ended by the system
(``listener``).
"""

from __future__ import annotations

import asyncio
import os
import resource
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from nxd_server.http.error_responses import ApiError, encode
from nxd_server.http.scope_keys import CROWDED
from nxd_server.settings import ServerSettings

KEPT_DESCRIPTORS = 64
"""For the health routes, files, restarted ranks, and connections that are accepted but not counted yet."""
MOST_BY_DEFAULT = 4096
HEALTH_CONNECTIONS = 8
FEWEST = 16


def most_connections(setting: int | None, in_use: int | None = None) -> int:
    """Return the connection limit: ``setting``, but at most what the process's descriptors allow,
    whose limit is raised as far as needed."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if in_use is None:
        in_use = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 32
        needed = (setting or MOST_BY_DEFAULT) + in_use + KEPT_DESCRIPTORS
        if resource.RLIM_INFINITY != limit < needed:  # often 1024, which is less than the system would allow
            limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    room = 2**20 if limit == resource.RLIM_INFINITY else limit - in_use - KEPT_DESCRIPTORS
    return max(FEWEST, min(MOST_BY_DEFAULT if setting is None else setting, room))


class Connections:
    """The connections of one server, fewer than it has descriptors. Used only by the event loop's thread."""

    def __init__(self, settings: ServerSettings):
        self.header_timeout = settings.header_timeout
        self.read_timeout = settings.request_timeout + settings.connection_timeout
        """Seconds that a client may take to read an answer that the server cannot write at once."""
        self.most = most_connections(settings.max_connections)
        self._most_per_address = settings.max_connections_per_address
        self._open: dict[LimitedProtocol, None] = {}
        """The oldest first."""
        self.ended: Counter[str] = Counter(dict.fromkeys(("late", "silent", "evicted", "refused"), 0))
        """Number of connections that the server ended, by reason."""

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: LimitedProtocol) -> bool:
        """Register a new connection; False if there is no room for it at all.

        If all are taken, the oldest that waits for a request is closed for it. If all are being answered, a few more
        are accepted, only for the health routes.
        """
        if self._most_per_address is not None:
            same = sum(other.address == connection.address for other in self._open)
            if same >= self._most_per_address:
                self.ended["refused"] += 1
                return False
        if len(self._open) >= self.most:
            waiting = next((other for other in self._open if other.conn.their_state is h11.IDLE), None)
            if waiting is not None:
                self.end(waiting, "evicted")
            elif len(self._open) >= self.most + HEALTH_CONNECTIONS:
                self.ended["refused"] += 1
                return False
            else:
                connection.app_state = {**connection.app_state, CROWDED: True}
        self._open[connection] = None
        return True

    def leave(self, connection: LimitedProtocol) -> None:
        self._open.pop(connection, None)

    def end(self, connection: LimitedProtocol, reason: str) -> None:
        self.ended[reason] += 1
        self.leave(connection)  # immediately, because its descriptor will be free in a moment
        connection.transport.abort()


def limited(connections: Connections) -> type[LimitedProtocol]:
    """Return the protocol class of a server with these connections."""
    return type("ServerProtocol", (LimitedProtocol,), {"all": connections})


class LimitedProtocol(H11Protocol):
    """A connection."""

    all: Connections
    address = ""
    _head_due: asyncio.TimerHandle | None = None
    _read_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Register a new connection, which must send a request before a deadline."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if self.all.admit(self):
            self._expect_head()
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self.all.leave(self)
        self._head_due = _cancelled(self._head_due)
        self._read_due = _cancelled(self._read_due)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._read_due = self.loop.call_later(self.all.read_timeout, self.all.end, self, "silent")
        super().pause_writing()

    def resume_writing(self) -> None:
        self._read_due = _cancelled(self._read_due)
        super().resume_writing()

    def _watch_head(self) -> None:
        """Give the client until a deadline to complete a head that it has begun."""
        if self.conn.their_state is not h11.IDLE or not self.conn.trailing_data[0]:
            self._head_due = _cancelled(self._head_due)
        elif self._head_due is None:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_due = self.loop.call_later(self.all.header_timeout, self.all.end, self, "late")

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and close; in the middle of an answer only close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(ApiError(400, msg, code="invalid_http").body())
            headers: list[Any] = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
