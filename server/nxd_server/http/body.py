"""Reading a request's body: bounded while it arrives, then strictly parsed, whatever the client sends.

A body is UTF-8 JSON with an object at the top, no ``NaN``, no lone surrogate, at most 200 levels deep. Everything
else is a 400 (or 413) before any other code sees it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from .errors import ApiError, bad_request

INLINE_PARSE_BYTES = 64 * 1024
"""A larger body is parsed in a thread, so that it does not hold up everybody's streams."""
DRAIN_BYTES = 64 * 2**20
DRAIN_SECONDS = 2.0


class ClientLeft(Exception):
    """The connection closed before the answer was complete; nobody is there to be told."""


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes, the limit of this server (max_body_bytes)")


def declared_length(request: Request) -> int | None:
    """The ``Content-Length``, or ``None`` for a chunked or absent body."""
    value = request.headers.get("content-length")
    return int(value) if value is not None and value.isascii() and value.isdigit() else None


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 as soon as it is known to exceed ``limit``, declared or not.
        ClientLeft: the connection closed in the middle.
    """
    declared = declared_length(request)
    if declared is not None and declared > limit:
        raise too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


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
        names = {name for name, _ in scope["headers"]}
        # Whether the client may still be sending the request.
        self.body_left = b"content-length" in names or b"transfer-encoding" in names
        self._started = b"expect" not in names

    async def __call__(self) -> Message:
        self._started = True
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self.body_left = False
        return message

    async def drain(self) -> None:
        """Read the rest of the body, at most :data:`DRAIN_BYTES` of it for :data:`DRAIN_SECONDS`."""
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


async def read_json(request: Request, limit: int, timeout: float) -> dict[str, Any]:
    """The body as a JSON object.

    Raises:
        ApiError: 413 too large; 400 not UTF-8, not JSON, not an object; 504 not here within ``timeout`` seconds.
        ClientLeft: the connection closed in the middle.
    """
    try:
        data = await asyncio.wait_for(read_body(request, limit), timeout)
    except asyncio.TimeoutError:
        raise ApiError(
            504,
            f"the request body was not complete after {timeout:g} s (request_timeout)",
            headers={"connection": "close"},
        ) from None
    if len(data) > INLINE_PARSE_BYTES:
        return await asyncio.to_thread(parse_json, data)
    return parse_json(data)


def parse_json(data: bytes) -> dict[str, Any]:
    """``data`` as a JSON object, strictly (see the top of this file)."""
    if not data.strip():
        raise bad_request("the request body is empty; a JSON object is expected", code="invalid_json")
    try:
        data.decode("utf-8", errors="strict")
    except UnicodeDecodeError as error:
        raise bad_request(f"the request body is not valid UTF-8 (byte {error.start})", code="invalid_json") from None
    try:
        value = from_json(data, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise bad_request(f"the request body must be a JSON object, not {kind}", code="invalid_json")
    return value
