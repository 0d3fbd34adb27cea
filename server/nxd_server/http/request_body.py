"""Reading a request's body: bounded while it arrives, alone and together with those of all other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from nxd_server.http.error_responses import ApiError
from nxd_server.http.release_memory import trim_soon
from nxd_server.text.body_limits import Bounds
from nxd_server.text.strict_json import parse_json

if TYPE_CHECKING:
    from nxd_server.app.service import Service

INLINE_PARSE_BYTES = 64 * 1024
"""A larger body is parsed aside: the parser holds up everybody for as long as it takes."""
ALL_BODIES_BYTES = 256 * 2**20
"""What all requests that are being read may hold."""
LARGE_BYTES = 2**18
PLAIN = {b"", b"identity"}
"""What a body's encodings may be."""
DRAIN_BYTES = 16 * 2**20
DRAIN_SECONDS = 2.0
SMALLEST_LIMIT, LARGEST_LIMIT = 2 * 2**20, 16 * 2**20
TOKEN_BYTES = 6
"""An id with its comma, or the text of a token."""


Parser = Callable[[bytes, Bounds], Awaitable[dict[str, Any]]]


class ClientLeft(Exception):
    """The connection closed before the answer was complete; nobody is there to be told."""


def default_limit(service: Service) -> int:
    """Bytes of the largest body that can be of use: as many prompts as one request may ask, as long as they may be."""
    if service.task != "generate":
        return LARGEST_LIMIT
    return min(LARGEST_LIMIT, max(SMALLEST_LIMIT, TOKEN_BYTES * service.max_len * service.settings.max_choices))


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes, the limit of this server (max_body_bytes)")


def declared_length(request: Request) -> int | None:
    """The ``Content-Length``, or ``None`` for a chunked or absent body."""
    value = request.headers.get("content-length")
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


class _Arriving:
    """One body on its way."""

    __slots__ = ("_last", "_pace", "chunks", "reader", "refused", "size")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0  # what it holds; 0 once it has made room for others
        self.reader: asyncio.Future[None] | None = None
        self.refused = False
        self._pace = self._last = 0.0

    def came(self, count: int, now: float) -> None:
        self._pace = self.pace(now) + count
        self._last = now

    def pace(self, now: float) -> float:
        """Bytes that came lately: after a second without any, half as many."""
        return self._pace * 0.5 ** (now - self._last)


class Bodies:
    """The bodies that are being read, and how much they hold.

    Args:
        most: bytes that they may hold together. Beyond that the slowest one makes room: those who send a little and
            then nothing would keep everybody else out.
        free: what is not larger needs no room.
    """

    def __init__(self, most: int = ALL_BODIES_BYTES, free: int = INLINE_PARSE_BYTES):
        self._most = most
        self._free = free
        self._large: dict[_Arriving, None] = {}
        self.held = 0

    async def read_json(
        self, request: Request, limit: int, timeout: float, bounds: Bounds, aside: Parser
    ) -> dict[str, Any]:
        """The body as a JSON object within ``bounds``; ``aside`` parses a large one.

        Raises:
            ApiError: 413 too large; 415 compressed; 504 not here within ``timeout`` seconds;
                503 when there is no room for it beside the others.
            ClientLeft: the connection closed in the middle.
            RequestError: as :func:`parse_json`; and what ``aside`` raises.
        """
        for name, value in request.headers.raw:  # which may come in several lines
            if name == b"content-encoding" and not set(value.lower().translate(None, b" \t").split(b",")) <= PLAIN:
                raise ApiError(
                    415, f"the request body is compressed ({value[:40].decode('latin-1')!r}); send it as it is"
                )
        declared = declared_length(request)
        if declared is not None and declared > limit:
            raise too_large(limit)
        body = _Arriving()
        try:
            body.reader = asyncio.ensure_future(self._read(request, limit, body))
            try:
                await asyncio.wait_for(body.reader, timeout)
            except asyncio.TimeoutError:
                raise ApiError(
                    504,
                    f"the request body was not complete after {timeout:g} s (request_timeout)",
                    headers={"connection": "close"},
                ) from None
            data = b"".join(body.chunks)
            body.chunks.clear()
            return await aside(data, bounds) if len(data) > INLINE_PARSE_BYTES else parse_json(data, bounds)
        finally:
            if body.size > LARGE_BYTES:
                trim_soon()
            self._let_go(body)

    async def _read(self, request: Request, limit: int, body: _Arriving) -> None:
        """Read the body; ApiError 413 as soon as it is known to exceed ``limit``."""
        more = True
        try:
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk, more = message.get("body", b""), message.get("more_body", False)
                body.chunks.append(chunk)
                body.size += len(chunk)
                self.held += len(chunk)
                if body.size > limit:
                    raise too_large(limit)
                if body.size > self._free:
                    self._make_room(body, len(chunk))
        except asyncio.CancelledError:
            if body.refused:
                raise _busy() from None
            raise
        finally:
            self._large.pop(body, None)

    def _make_room(self, body: _Arriving, more: int) -> None:
        """For ``more`` bytes of ``body``: refuse the slowest until all others have room; raises where it is that."""
        now = asyncio.get_running_loop().time()
        body.came(more, now)
        self._large[body] = None
        while self.held > self._most:
            slowest = min(self._large, key=lambda one: one.pace(now))
            del self._large[slowest]
            if slowest is body:
                raise _busy()
            self._let_go(slowest)
            slowest.refused = True
            if slowest.reader is not None:
                slowest.reader.cancel()

    def _let_go(self, body: _Arriving) -> None:
        self.held -= body.size
        body.size = 0
        body.chunks.clear()


def _busy() -> ApiError:
    return ApiError(503, "too many large requests are coming in at once", code="busy", retry_after=1)


async def client_left(receive: Receive) -> None:
    """Return when the connection is closed; for a request whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


class DrainingReceive:
    """``receive`` that knows whether the body was read to its end, and can read on when it was not.

    A client that writes everything before it reads would find its connection reset and never see an early refusal;
    so a refusal waits a moment for the rest. One that asked for leave (``Expect: 100-continue``) has sent nothing yet
    and is answered at once.
    """

    def __init__(self, receive: Receive, scope: Scope):
        self._receive = receive
        headers = dict(scope["headers"])
        # Whether the client may still be sending the request.
        self.body_left = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self._started = b"expect" not in headers

    async def __call__(self) -> Message:
        self._started = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.body_left = False
        return message

    async def drain(self) -> None:
        """Read the rest of the body, at most :data:`DRAIN_BYTES` of it for :data:`DRAIN_SECONDS`.

        Where :attr:`body_left` still holds, the connection is closed with the answer: nothing more of it is read.
        """
        if self.body_left and self._started:
            try:
                await asyncio.wait_for(self._discard(), DRAIN_SECONDS)
            except asyncio.TimeoutError:
                return

    async def _discard(self) -> None:
        size = 0
        while self.body_left and size <= DRAIN_BYTES:
            message = await self()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            size += len(message.get("body", b""))
