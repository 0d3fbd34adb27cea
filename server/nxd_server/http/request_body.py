"""Read request bodies within limits, for each body and for all together, while they arrive."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from nxd_server.http.error_responses import ApiError
from nxd_server.http.release_memory import trim_soon
from nxd_server.http.scope_keys import LET_GO
from nxd_server.text.field_bounds import Bounds
from nxd_server.text.strict_json import parse_json

if TYPE_CHECKING:
    from nxd_server.app.service import Service

INLINE_PARSE_BYTES = 64 * 1024
"""A larger body is parsed in another process, because the parser blocks every other request."""
ALL_BODIES_BYTES = 256 * 2**20
"""Limit of all bodies that are being read, and of the larger ones that were parsed, together."""
LARGE_BYTES = 2**18
PLAIN = {b"", b"identity"}
"""Accepted content encodings."""
DRAIN_BYTES = 16 * 2**20
DRAIN_SECONDS = 2.0
SMALLEST_LIMIT, LARGEST_LIMIT = 2 * 2**20, 16 * 2**20
TOKEN_BYTES = 6
"""An id with its comma, or the text of a token."""


Parser = Callable[[bytes, Bounds], Awaitable[dict[str, Any]]]


class ClientLeft(Exception):
    """The connection closed before the answer was complete, so there is nobody to answer."""


def default_limit(service: Service) -> int:
    """Return the size of the largest useful body: the most prompts of a request at their maximum length."""
    if service.task != "generate":
        return LARGEST_LIMIT
    return min(LARGEST_LIMIT, max(SMALLEST_LIMIT, TOKEN_BYTES * service.max_len * service.settings.max_choices))


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes, the limit of this server (max_body_bytes)")


def declared_length(request: Request) -> int | None:
    """Return the ``Content-Length``, or ``None`` for a chunked or absent body."""
    value = request.headers.get("content-length")
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


class _Arriving:
    """A body that is being received."""

    __slots__ = ("_last", "_pace", "chunks", "reader", "refused", "size")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.size = 0  # bytes held; 0 once it was dropped to make room for others
        self.reader: asyncio.Future[None] | None = None
        self.refused = False
        self._pace = self._last = 0.0

    def came(self, count: int, now: float) -> None:
        self._pace = self.pace(now) + count
        self._last = now

    def pace(self, now: float) -> float:
        """Return the recent receive rate, in bytes; it halves with every second without data."""
        return self._pace * 0.5 ** (now - self._last)


class Bodies:
    """The bodies that are being read or, if they are large, answered, and how many bytes they hold.

    Args:
        most: bytes that they may hold together. Beyond that the slowest to arrive is dropped: clients that send a
            little and then stall would otherwise keep everyone else out.
        free: bodies up to this size do not count.
    """

    def __init__(self, most: int = ALL_BODIES_BYTES, free: int = INLINE_PARSE_BYTES):
        self._most = most
        self._free = free
        self._large: dict[_Arriving, None] = {}
        self.held = 0

    async def read_json(
        self, request: Request, limit: int, timeout: float, bounds: Bounds, aside: Parser
    ) -> dict[str, Any]:
        """Return the body as a JSON object within ``bounds``; ``aside`` parses a large one.

        Raises:
            ApiError: 413 too large; 415 compressed; 504 not complete within ``timeout`` seconds;
                503 if it does not fit beside the others.
            ClientLeft: the connection closed before the end of the body.
            RequestError: as :func:`parse_json`; and whatever ``aside`` raises.
        """
        for name, value in request.headers.raw:  # the header may occur several times
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
            if len(data) <= INLINE_PARSE_BYTES:
                return parse_json(data, bounds)
            parsed = await aside(data, bounds)
            request.scope[LET_GO] = functools.partial(self._let_go, body)  # its texts are kept as long as the request
            return parsed
        finally:
            if body.size > LARGE_BYTES:
                trim_soon()
            if LET_GO not in request.scope:
                self._let_go(body)

    async def _read(self, request: Request, limit: int, body: _Arriving) -> None:
        """Read the body. Raises ApiError 413 as soon as it is known to exceed ``limit``."""
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
        """Make room for ``more`` bytes of ``body``: drop the slowest until the rest fit; raise if it is ``body``."""
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
    return ApiError(503, "too many large requests are arriving at once", code="busy", retry_after=1)


async def client_left(receive: Receive) -> None:
    """Return when the connection is closed; call after the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        continue


class DrainingReceive:
    """A ``receive`` that tracks whether the body was read to its end, and can read the rest.

    A client that writes everything before it reads would have its connection reset and never see an early error,
    so the error waits briefly for the rest. A client that waits for permission (``Expect: 100-continue``) has sent
    nothing yet and is answered at once.
    """

    def __init__(self, receive: Receive, scope: Scope):
        self._receive = receive
        headers = dict(scope["headers"])
        # Whether the client may still be sending its request.
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

        If :attr:`body_left` is still set, the connection is closed after the answer, and no more of it is read.
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
