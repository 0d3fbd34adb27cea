"""Server-sent events, written by hand: OpenAI's format is only ``data: ...`` and a blank line.

A stream ends in one of two ways. Complete: every choice's last chunk with its finish reason, the usage if requested,
``data: [DONE]``. Failed: one ``data: {"error": ...}`` and the end, with neither a finish reason nor ``[DONE]``, so that
no client can mistake half an answer for a complete one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nxd_infer.errors import NxdError
from nxd_server.engine.events import FinishEvent, TokenEvent, Usage
from nxd_server.http.error_responses import ApiError, as_api_error, encode, internal
from nxd_server.http.openai.generation import Generation
from nxd_server.http.request_body import ClientLeft
from nxd_server.http.scope_keys import REFUSAL

logger = logging.getLogger("nxd_server.http")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the chunks
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class ChunkWriter(Protocol):
    """Converts one route's events to chunks."""

    def begin(self, weight_version: int | None) -> bytes:
        """Return what precedes the first event; the version of the weights is known by now."""
        ...

    def event(self, choice: int, event: TokenEvent | FinishEvent) -> bytes:
        """Return the chunks of one event; empty if there is nothing to show."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts, or empty if it was not requested."""
        ...


class EventStream(Response):
    """An ASGI response that runs a generation and streams it.

    Nothing is sent before the first event or ``keep_alive`` seconds, so that an error before that still gets its own
    status.
    """

    def __init__(self, generation: Generation, writer: ChunkWriter, keep_alive: float, request_id: str):
        # Only the base class's type is used: its constructor would render a body and its length.
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._writer = writer
        self._keep_alive = keep_alive
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            first = await generation.next(self._keep_alive)
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                await self._write(generation, first, send)
            except (ClientLeft, asyncio.CancelledError):
                raise
            except (NxdError, ApiError) as error:
                await _fail(generation, scope, send, as_api_error(error, self._request_id))
            except Exception:
                logger.exception("request %s: a stream failed", self._request_id)
                await _fail(generation, scope, send, internal(self._request_id))

    async def _write(
        self, generation: Generation, item: tuple[int, TokenEvent | FinishEvent] | None, send: Send
    ) -> None:
        begun, sent = False, time.monotonic()
        while True:
            if item is None:
                await _send(generation, send, KEEP_ALIVE)
                sent = time.monotonic()
            else:
                # Send all available events in one write, so that a slow connection does not slow the event loop.
                chunks = [] if begun else [self._writer.begin(generation.weight_version)]
                begun = True
                chunks.append(self._writer.event(*item))
                failure: Exception | None = None
                try:
                    while generation.unfinished and (more := generation.ready()) is not None:
                        chunks.append(self._writer.event(*more))
                except ClientLeft:
                    raise
                except Exception as error:
                    failure = error
                body = b"".join(chunks)
                if not body and time.monotonic() - sent >= self._keep_alive:  # what is held back may take long
                    body = KEEP_ALIVE
                if body:
                    await _send(generation, send, body)
                    sent = time.monotonic()
                if failure is not None:
                    raise failure
            if not generation.unfinished:
                break
            item = await generation.next(max(0.0, sent + self._keep_alive - time.monotonic()))
        tail = self._writer.usage(generation.usage) + DONE
        await _send(generation, send, tail, more=False)


async def _send(generation: Generation, send: Send, body: bytes, *, more: bool = True) -> None:
    """Send ``body``. Raises ClientLeft if the connection closed while this waited for the client to read."""
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        generation.check_client()


async def _fail(generation: Generation, scope: Scope, send: Send, error: ApiError) -> None:
    scope[REFUSAL] = error
    await _send(generation, send, b"data: " + encode(error.body()) + b"\n\n", more=False)
