"""Server-sent events, written by hand: OpenAI's format is only ``data: ...`` and a blank line.

A stream ends in one of two ways. Complete: every choice's last chunk with its finish reason, the usage if requested,
``data: [DONE]``. Failed: one ``data: {"error": ...}`` and the end, with neither a finish reason nor ``[DONE]``, so that
no client can mistake half an answer for a complete one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nxd_infer.errors import NxdError
from nxd_server.engine.request import FinishEvent, TokenEvent, Usage
from nxd_server.http.error_responses import ApiError, as_api_error, encode, internal
from nxd_server.http.openai.generation import Generation
from nxd_server.http.openai.schemas import SamplingBody
from nxd_server.http.request_body import ClientLeft
from nxd_server.http.request_context import context_of, request_id
from nxd_server.http.scope_keys import REFUSAL

logger = logging.getLogger("nxd_server.http")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the chunks
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PADDED_TO = 64
"""Padded chunks are a multiple of this many bytes long, so that their sizes reveal little about the tokens."""


def usage_object(usage: Usage, reasoning: int | None = None) -> dict[str, Any]:
    """Return the field ``usage``; ``reasoning``: the tokens of the answer that are, None for a model without."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


class Answer:
    """One request's answer, whole or in chunks; a route says what a choice (``choice``) or its chunk (``opening``,
    ``event``) holds.

    Without ``continuous_usage_stats`` the counts are null until the last chunk, without ``include_usage`` absent.
    Constant parts are rendered once.
    """

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    """The field ``object`` of the whole answer, and that of a chunk."""

    def __init__(self, id_prefix: str, model: str, body: SamplingBody, prompt_lengths: Sequence[int]):
        """Choice ``c`` answers prompt ``c // n``."""
        self._fields: dict[str, Any] = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": self.CHUNK,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b""
        self._prompts, self._n = prompt_lengths, body.n
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._counts = self._usage and bool(options and options.continuous_usage_stats)
        self._pads = bool(options and options.include_obfuscation)
        self._tokens: dict[int, int] = {}

    async def whole(self, generation: Generation) -> Response:
        """Return the response with all choices once they have ended. Raises as :meth:`Generation.next`."""
        ended = await generation.whole(self.token)
        answer = {
            **self._fields,
            "object": self.WHOLE,
            "choices": [{"index": index, **self.choice(index, *one)} for index, one in enumerate(ended)],
            "usage": usage_object(generation.usage, self.reasoning_tokens),
            "weight_version": generation.weight_version,
        }
        return Response(encode(answer), media_type="application/json")

    def token(self, choice: int, event: TokenEvent) -> None:
        """Take a token of a whole answer, except the one that stops it."""
        raise NotImplementedError

    def choice(self, choice: int, text: str, reason: str) -> dict[str, Any]:
        """Return the fields of a whole choice: its text, and the engine's finish reason."""
        raise NotImplementedError

    def begin(self, weight_version: int | None) -> bytes:
        """Return what precedes the first event; the version of the weights is known by now."""
        self._head = b"data: " + json.dumps({**self._fields, "weight_version": weight_version})[:-1].encode()
        return self.opening()

    def opening(self) -> bytes:
        """Return the chunks before the first event."""
        raise NotImplementedError

    def event(self, choice: int, event: TokenEvent | FinishEvent) -> bytes:
        """Return the chunks of one event; empty if there is nothing to show."""
        raise NotImplementedError

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens of all choices so far are reasoning; None if the model does not reason."""
        return None

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the token counts, or empty if it was not requested."""
        if not self._usage:
            return b""
        counts = json.dumps(usage_object(usage, self.reasoning_tokens))
        return self._head + b',"choices":[],"usage":' + counts.encode() + b"}\n\n"

    def count(self, choice: int) -> None:
        """Count one more token of ``choice``."""
        if self._counts:
            self._tokens[choice] = self._tokens.get(choice, 0) + 1

    def chunk(self, choice: int, content: str, logprobs: dict | None, reason: str | None) -> bytes:
        """Return the chunk of one choice; ``content``: its route's own field, as JSON."""
        end = f'"{reason}"' if reason else "null"
        part = f'{{"index":{choice},{content},"logprobs":{json.dumps(logprobs)},"finish_reason":{end}}}]'
        chunk = self._head + b',"choices":[' + part.encode()
        if self._counts:
            usage = Usage(self._prompts[choice // self._n], self._tokens.get(choice, 0))
            chunk += b',"usage":' + json.dumps(usage_object(usage)).encode()
        elif self._usage:
            chunk += b',"usage":null'
        if self._pads:
            chunk += b',"obfuscation":"'
            short = -(len(chunk) + len(b'"}\n\n')) % PADDED_TO
            chunk += secrets.token_hex(PADDED_TO)[:short].encode() + b'"'
        return chunk + b"}\n\n"


async def respond(request: Request, body: SamplingBody, generation: Generation, answer: Answer) -> Response:
    """Return the response to a request: its whole answer, or a stream that the server then runs."""
    if body.stream:
        return EventStream(generation, answer, context_of(request).settings.keep_alive_interval, request_id(request))
    return await answer.whole(generation)


class EventStream(Response):
    """An ASGI response that runs a generation and streams it.

    Nothing is sent before the first event or ``keep_alive`` seconds, so that an error before that still gets its own
    status.
    """

    def __init__(self, generation: Generation, answer: Answer, keep_alive: float, request_id: str):
        # Only the base class's type is used: its constructor would render a body and its length.
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._answer = answer
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
                chunks = [] if begun else [self._answer.begin(generation.weight_version)]
                begun = True
                chunks.append(self._answer.event(*item))
                failure: Exception | None = None
                try:
                    while generation.unfinished and (more := generation.ready()) is not None:
                        chunks.append(self._answer.event(*more))
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
        tail = self._answer.usage(generation.usage) + DONE
        await _send(generation, send, tail, more=False)


async def _send(generation: Generation, send: Send, body: bytes, *, more: bool = True) -> None:
    """Send ``body``. Raises ClientLeft if the connection closed while this waited for the client to read."""
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        generation.check_client()


async def _fail(generation: Generation, scope: Scope, send: Send, error: ApiError) -> None:
    scope[REFUSAL] = error
    await _send(generation, send, b"data: " + encode(error.body()) + b"\n\n", more=False)
