"""uvicorn's HTTP/1.1 protocol: its one answer of its own in our shape, and no patience for clients that never read,
never write, or write a byte at a time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import struct
import termios
from collections.abc import Iterable
from typing import Any

import h11
from h11._receivebuffer import ReceiveBuffer
from uvicorn.protocols.http.h11_impl import H11Protocol

from nxd_server.http.connections import BODY_PIECE, Connections
from nxd_server.http.error_responses import ApiError, encode
from nxd_server.http.scope_keys import CROWDED

MOST_HEAD_BYTES = 2**14
MOST_TINY_CHUNKS = 4096
TINY_BYTES = 16
"""Chunks of a body that are smaller, on average, take longer to find than to read."""


def guarded(connections: Connections) -> type[JsonErrorProtocol]:
    """The protocol class of a server that has these connections."""
    return type("GuardedProtocol", (JsonErrorProtocol,), {"guard": connections})


class _StrictBuffer(ReceiveBuffer):
    """As its base, but a chunk's size ends its line: the library takes spaces there, which others take for an error."""

    def maybe_extract_next_line(self) -> bytearray | None:
        line = super().maybe_extract_next_line()
        if line is not None and line[-3:-2].isspace():
            raise h11.RemoteProtocolError("a space behind the size of a chunk")
        return line


class _StrictConnection(h11.Connection):
    """As its base, but a large head is an error even if all of it is here, as is a body in very many tiny chunks."""

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
                raise h11.RemoteProtocolError("the body comes in too many too small chunks")
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


class JsonErrorProtocol(H11Protocol):
    """What is not HTTP at all never reaches the application; it too is refused as JSON."""

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP, and close; a peer in the middle of an answer is only closed."""
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
    """Since when the client owes what it owes, on the loop's clock."""
    _piece = 0
    """Bytes of the piece of a body that have come."""
    head_due: float | None = None
    """When the head of a request must be complete; None while none has begun."""
    closing: tuple[int, float] | None = None
    """Bytes that a connection which is being closed has not taken, and since when it takes none."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn = _StrictConnection()

    @property
    def owes(self) -> bool:
        """Whether the client has to send something before the server has something to do."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def crowd(self) -> None:
        """Serve the health routes alone here: there are more connections than there is room for."""
        self.app_state = {**self.app_state, CROWDED: True}

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """A new connection: it has until a deadline to say what it wants."""
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self.since = self.loop.time()
        self.head_due = self.since + self.guard.header_timeout
        if not self.guard.admit(self):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
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
        """An answer is out; what the client sent meanwhile may be half of the next request."""
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
        """The client's buffers are full: it has ``timeout_keep_alive`` seconds to take some of its answer."""
        super().pause_writing()
        self._watch_reader(self.unread())

    def resume_writing(self) -> None:
        """The client reads again."""
        self._end_watch()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever ended it."""
        self.guard.leave(self)
        self._end_watch()
        super().connection_lost(exc)

    def _watch_reader(self, left: int) -> None:
        self._stall = self.loop.call_later(self.timeout_keep_alive, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        left = self.unread()
        if left < before:  # slowly, but it reads
            self._watch_reader(left)
        else:
            self.transport.abort()

    def unread(self) -> int:
        """Bytes that the client's side has not taken. The system's part counts: it is megabytes, and asks for more only
        when a third of them is gone, which a slow client may take minutes for."""
        queued = struct.pack("i", 0)
        with contextlib.suppress(OSError, ValueError):  # closed already, or a system that does not tell
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        return self.transport.get_write_buffer_size() + struct.unpack("i", queued)[0]

    def _end_watch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
