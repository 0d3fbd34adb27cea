"""uvicorn's HTTP/1.1 protocol: its one answer of its own in our shape, and no patience for clients that never read."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import struct
import termios

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError, encode


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

    # --- clients that do not read -----------------------------------------------------------------------

    _stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """The client's buffers are full: it has ``timeout_keep_alive`` seconds to take some of its answer."""
        super().pause_writing()
        self._watch_reader(self._unread())

    def resume_writing(self) -> None:
        """The client reads again."""
        self._end_watch()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, whoever ended it."""
        self._end_watch()
        super().connection_lost(exc)

    def _watch_reader(self, left: int) -> None:
        self._stall = self.loop.call_later(self.timeout_keep_alive, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        left = self._unread()
        if left < before:  # slowly, but it reads
            self._watch_reader(left)
        else:
            self.transport.abort()

    def _unread(self) -> int:
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
