"""HTTP/1.1 over one connection, by hand: a client that can be slow, stop in the middle, or send what is none."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any


class Violation(Exception):
    """Something that must always hold does not."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    begun: float
    """When it was asked, on ``time.monotonic``'s clock ..."""
    ended: float
    """... and when the last byte was here."""

    def __str__(self) -> str:
        return f"{self.status} after {self.ended - self.begun:.2f} s: {self.body[-600:]!r}"


class Wire:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self._writer = reader, writer
        self.over = False
        """Whether the server said that it closes the connection."""

    @classmethod
    async def open(cls, port: int) -> Wire:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, begun: float, pause: float = 0.0) -> Answer:
        """The whole answer, ``pause`` seconds before each of its chunks; IncompleteReadError or ConnectionError where
        it has no end."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        self.over = headers.get("connection") == "close"
        if headers.get("transfer-encoding") == "chunked":
            body = await self._chunks(pause)
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split(" ")[1]), headers, body, begun, time.monotonic())

    async def _chunks(self, pause: float) -> bytes:
        parts = []
        while True:
            await asyncio.sleep(pause)
            size = int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16)
            parts.append((await self.reader.readexactly(size + 2))[:-2])
            if size == 0:
                return b"".join(parts)

    def abort(self) -> None:
        """As a client that is gone: what it had not read is thrown away."""
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()


def request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    """A request's bytes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: soak", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# --- tasks ----------------------------------------------------------------------------------------------


async def all_of(*works: Awaitable[Any]) -> None:
    """Until all have ended; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(*tasks)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them until all have ended. Once is not enough: before Python 3.12 ``asyncio.wait_for`` returns an answer
    that comes at the same moment instead, and its caller goes on for ever."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1.0)
    await asyncio.gather(*tasks, return_exceptions=True)  # what they failed of has been told, or comes of this


def waiting() -> str:
    """Every task that has not ended, and at which lines; without tasks, this thread's."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return "".join(traceback.format_stack())  # no task runs
    lines = []
    for task in tasks:
        coroutine, places = task.get_coro(), []
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            coroutine = getattr(coroutine, "cr_await", None)
        lines.append(" > ".join(places))
    return f"at {time.strftime('%X')} these wait:\n" + "\n".join(sorted(lines))
