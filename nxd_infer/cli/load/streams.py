"""Streamed answers from OpenAI's routes, with only the standard library.

The client may share its cores with the server, so it does as little as possible: one read, one scan for event ends, one
clock.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from nxd_infer.errors import NxdError


class ServerError(NxdError):
    """A server refused a request, broke off a stream, or cannot be reached."""


@dataclass
class Stream:
    """One streamed answer; times are from ``time.perf_counter``."""

    sent: float
    times: list[float] = field(default_factory=list)
    """When each chunk with text arrived."""
    tokens: int = 0
    """As the server counts them ..."""
    prompt_tokens: int = 0
    done: bool = False
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def first_token(self) -> float:
        """Seconds."""
        return self.times[0] - self.sent

    @property
    def seconds(self) -> float:
        """From the request to the last chunk."""
        return self.times[-1] - self.sent

    @property
    def seconds_per_token(self) -> float:
        """After the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


class Server:
    """Where requests go. Raises ServerError if ``url`` is none of http or https."""

    def __init__(self, url: str, api_key: str | None = None):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is no URL of a server, such as http://localhost:8000")
        self._host, secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if secure else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if secure else None
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> bytes:
        """Return the body. Raises ServerError."""
        try:
            reader, writer = await self._send("GET", path)
            try:
                status, _ = await _head(reader)
                body = await reader.read()
            finally:
                writer.close()
        except (OSError, EOFError, ValueError) as error:
            raise ServerError(f"{self._host}:{self._port} cannot be reached: {error}") from None
        if status != 200:
            raise ServerError(f"{path} answered {status}: {body[:500].decode(errors='replace')}")
        return body

    async def stream(
        self, body: Mapping[str, Any], into: Stream | None = None, write: Callable[[str], None] | None = None
    ) -> Stream:
        """Send a chat (with ``messages``) or a completion; note when each chunk arrives, and ``write`` its text.

        ``body`` is the request without the fields about streams. Failures are in ``error``: a status, a broken stream.
        """
        result = into or Stream(0.0)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        result.sent = time.perf_counter()
        try:
            reader, writer = await self._send("POST", path, content)
            try:
                status, chunked = await _head(reader)
                if status == 200:
                    await _events(reader, chunked, result, write)
                    result.error = result.error or ("" if result.done else "the stream ended without [DONE]")
                else:
                    result.error = f"status {status}: {(await reader.read(500)).decode(errors='replace')}"
            finally:
                writer.close()
        except (OSError, EOFError, asyncio.LimitOverrunError, LookupError, TypeError, ValueError) as error:
            result.error = f"{type(error).__name__}: {error}"
        return result

    async def _send(
        self, method: str, path: str, content: bytes = b""
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        about = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content else ""
        writer.write(f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{about}\r\n".encode() + content)
        await writer.drain()
        return reader, writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Return the status, and whether the body comes in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return int(head.split(b" ", 2)[1]), b"transfer-encoding: chunked" in head


async def _events(
    reader: asyncio.StreamReader, chunked: bool, result: Stream, write: Callable[[str], None] | None
) -> None:
    """Read the body; chunk sizes between an event's lines never split the event."""
    pending = b""
    while not result.done and not result.error:
        if chunked:
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = (await reader.readexactly(size + 2))[:-2]
        else:
            piece = await reader.read(65536)
        if not piece:
            return
        pending += piece
        now = time.perf_counter()
        *events, pending = pending.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                _event(event[6:], now, result, write)


def _event(data: bytes, now: float, result: Stream, write: Callable[[str], None] | None) -> None:
    if data == b"[DONE]":
        result.done = True
        return
    event = json.loads(data)
    if "error" in event:
        result.error = f"stream error: {event['error']}"
        return
    if event.get("usage"):
        result.tokens, result.prompt_tokens = (
            event["usage"]["completion_tokens"],
            event["usage"].get("prompt_tokens", 0),
        )
    for choice in event["choices"]:
        if text := choice.get("text") or choice.get("delta", {}).get("content"):
            result.times.append(now)
            if write is not None:
                write(text)
