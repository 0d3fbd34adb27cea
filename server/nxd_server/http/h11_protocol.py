"""uvicorn's HTTP/1.1 protocol, with its own error response in our format, and limits for clients that never read,
never write, or write one byte at a time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import select
import struct
import termios
from collections.abc import Iterable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from nxd_server.http.connections import BODY_PIECE, Connections, reads
from nxd_server.http.error_responses import ApiError, encode
from nxd_server.http.scope_keys import ARRIVED, CROWDED

MOST_HEAD_BYTES = 2**14
MOST_TINY_CHUNKS = 4096
TINY_BYTES = 16
"""Body chunks that are smaller than this on average take longer to find than to read."""


def guarded(connections: Connections) -> type[JsonErrorProtocol]:
    """Return the protocol class of a server with these connections."""
    return type("GuardedProtocol", (JsonErrorProtocol,), {"guard": connections})


class _StrictBuffer(ReceiveBuffer):
    """Like its base, but rejects spaces after a chunk's size: the library accepts them, other servers do not."""

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()
        if line is not None and line[-3:-2].isspace():
            raise h11.RemoteProtocolError("a space after the size of a chunk")
        return line


class _StrictConnection(h11.Connection):
    """Like its base, but rejects a large head even if it is complete, and a body in very many tiny chunks."""

    _chunks = _bytes = 0

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEAD_BYTES)
        self._receive_buffer = _StrictBuffer()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > MOST_TINY_CHUNKS and self._bytes < TINY_BYTES * self._chunks:
                raise h11.RemoteProtocolError("the body has too many too small chunks")
        elif isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            _check_size(event.headers, len(event.target))
            if event.http_version not in (b"1.0", b"1.1"):
                raise h11.RemoteProtocolError("another version of HTTP")
        elif isinstance(event, h11.EndOfMessage):
            _check_size(event.headers)
        return event


def _check_size(headers: Iterable[tuple[bytes, bytes]], size: int = 0) -> None:
    if size + sum(len(name) + len(value) + 4 for name, value in headers) > MOST_HEAD_BYTES:
        raise h11.RemoteProtocolError(f"more than {MOST_HEAD_BYTES} bytes of headers")


class _Quiet(logging.LoggerAdapter):
    """Logs warnings for debugging only: what a client sends would fill the log."""

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *args: object, **more: Any) -> None:
        self.debug(msg, *args, **more)


class JsonErrorProtocol(H11Protocol):
    """Requests that are not HTTP never reach the application; they get a JSON error too."""

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and close; in the middle of an answer only close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = encode(ApiError(400, msg, code="invalid_http").body())
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    # --- clients that do not write -----------------------------------------------------------------------

    guard: Connections
    address = ""
    since = 0.0
    """Start of the current debt of the client, on the loop's clock."""
    _piece = 0
    """Bytes received of the current piece of a body."""
    head_due: float | None = None
    """When the head of a request must be complete; None if none has begun."""
    closing: tuple[int, float] | None = None
    """While closing: the bytes not taken by the client at some time, since when it has taken no piece of them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn = _StrictConnection()
        self.logger = _Quiet(self.logger, {})

    @property
    def owes(self) -> bool:
        """Whether the server waits for the client to send something."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def left(self) -> bool:
        """Whether the client has closed a connection of which nothing is read now: its next request has begun to arrive
        before this one is answered."""
        if not self.flow.read_paused or self.conn.their_state is not h11.DONE:
            return False
        end = select.poll()
        end.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)  # HUP and ERR always count
        return bool(end.poll(0))

    def crowd(self) -> None:
        """Serve only the health routes here, because there are too many connections."""
        self.app_state = {**self.app_state, CROWDED: True}

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Register a new connection, which must send a request before a deadline."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.since = self.loop.time()
        self.head_due = self.since + self.guard.header_timeout
        if not self.guard.admit(self):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Track the received bytes."""
        inside = self.conn.their_state is h11.SEND_BODY
        if self.head_due is None and self.conn.their_state is h11.IDLE:
            self._owe_head()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self.head_due = None
        if self.conn.their_state is h11.SEND_BODY:
            self._piece += len(data)
            if not inside or self._piece >= BODY_PIECE:
                self.guard.due(self)
                self._piece = 0

    def on_response_complete(self) -> None:
        """Called after an answer; the client may already have sent part of its next request."""
        self.guard.due(self)
        self._piece = 0
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._owe_head()

    def _owe_head(self) -> None:
        self.guard.due(self)
        self.head_due = self.since + self.guard.header_timeout

    # --- clients that do not read -----------------------------------------------------------------------

    _stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client's buffers are full: it has ``timeout_keep_alive`` seconds to read a piece of its answer."""
        super().pause_writing()
        self._watch_reader(self.unread())

    def resume_writing(self) -> None:
        """The client reads again."""
        self._end_watch()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self.guard.leave(self)
        self._end_watch()
        super().connection_lost(exc)

    def _watch_reader(self, left: int) -> None:
        self._stall = self.loop.call_later(self.timeout_keep_alive, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        left = self.unread()
        if reads(before, left):
            self._watch_reader(left)
        else:
            self.transport.abort()

    def is_late(self, now: float) -> bool:
        """Return whether the client still has to read an answer whose time is up."""
        if not self.flow.write_paused or self.cycle is None:
            return False
        return now > self.cycle.scope.get(ARRIVED, now) + self.guard.longest

    def unread(self) -> int:
        """Return the bytes that the client has not taken, including the system's buffer: it holds megabytes, and
        accepts more only when a third is gone, which a slow client may take minutes for."""
        queued = struct.pack("i", 0)
        with contextlib.suppress(OSError, ValueError):  # closed already, or not supported by the system
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + struct.unpack("i", queued)[0]

    def _end_watch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
