"""A load client for OpenAI's completions route: many streams at once, with only the standard library.

It shares its cores with the server, so it does as little as possible: one read, one scan for event ends, one clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Stream:
    """One streamed answer; times are from ``time.perf_counter``."""

    sent: float
    times: list[float] = field(default_factory=list)
    """Arrival time of each chunk with text."""
    tokens: int = 0
    """As the server counts them."""
    done: bool = False
    error: str = ""

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True)
class Load:
    """Results of simultaneous streams."""

    streams: list[Stream]
    seconds: float
    """From the first request to the last token."""
    client_seconds: float
    """CPU time that this client took from the server."""

    @property
    def rate(self) -> float:
        return sum(stream.tokens for stream in self.streams) / self.seconds


async def stream(port: int, prompt: Sequence[int], max_tokens: int, into: Stream | None = None) -> Stream:
    """Request exactly ``max_tokens`` greedy tokens and record when each chunk arrives.

    Failures are in ``error``: a status, a broken stream, a truncated answer.
    """
    result = into or Stream(0.0)
    body = json.dumps(
        {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    result.sent = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1].decode()
        if status != "200":
            result.error = f"status {status}: {(await reader.read(500)).decode(errors='replace')}"
            return result
        await _events(reader, result)
        if not result.done:
            result.error = result.error or "the stream ended without [DONE]"
        elif result.tokens != max_tokens:
            result.error = f"{result.tokens} tokens instead of {max_tokens}"
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        writer.close()
    return result


async def _events(reader: asyncio.StreamReader, result: Stream) -> None:
    """Read the chunked body; chunk sizes between an event's lines never split the event."""
    pending = b""
    while not result.done and not result.error:
        size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
        if size == 0:
            return
        pending += (await reader.readexactly(size + 2))[:-2]
        now = time.perf_counter()
        *events, pending = pending.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                _event(event[6:], now, result)


def _event(data: bytes, now: float, result: Stream) -> None:
    if data == b"[DONE]":
        result.done = True
        return
    event = json.loads(data)
    if "error" in event:
        result.error = f"stream error: {event['error']}"
        return
    if event.get("usage"):
        result.tokens = event["usage"]["completion_tokens"]
    if event["choices"] and event["choices"][0]["text"]:
        result.times.append(now)


def load(port: int, prompts: Sequence[Sequence[int]], max_tokens: int, timeout: float = 300.0) -> Load:
    """Run one client per prompt, all at once. Raises SystemExit if one fails or the time is over."""

    async def everyone() -> list[Stream]:
        tasks = [stream(port, prompt, max_tokens) for prompt in prompts]
        return await asyncio.wait_for(asyncio.gather(*tasks), timeout)

    cpu = time.process_time()
    return checked(asyncio.run(everyone()), time.process_time() - cpu)


def checked(streams: list[Stream], client_seconds: float) -> Load:
    """Return the load of ``streams``. Raises SystemExit if one of them failed."""
    for number, one in enumerate(streams):
        if one.error:
            raise SystemExit(f"stream {number} of {len(streams)}: {one.error}")
    begin, end = min(one.sent for one in streams), max(one.times[-1] for one in streams)
    return Load(streams, end - begin, client_seconds)
