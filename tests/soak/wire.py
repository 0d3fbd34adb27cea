"""HTTP/1.1 over one connection, by hand: a client that can be slow, stop in the middle, or send what is none."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from dataclasses import dataclass

BUFFER = 4096


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

    @property
    def text(self) -> str:
        return self.body.decode()

    def __str__(self) -> str:
        return f"{self.status} after {self.ended - self.begun:.2f} s: {self.body[-600:]!r}"


class Pace:
    """How a client reads: with ``seconds`` of pauses in all."""

    def __init__(self, rng: random.Random, seconds: float):
        self._rng = rng
        self.seconds = self._left = seconds

    async def pause(self) -> None:
        wait = min(self._left, self._rng.uniform(0.0, 0.4))
        self._left -= wait
        if wait:
            await asyncio.sleep(wait)


class Wire:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self.over = False
        """Whether the server said that it closes the connection."""

    @classmethod
    async def open(cls, port: int, *, slow: bool = False) -> Wire:
        """``slow``: only a few thousand bytes wait unread on this side."""
        connection = socket.socket()
        connection.setblocking(False)
        try:
            if slow:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)  # before it connects
            await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        except BaseException:
            connection.close()
            raise
        return cls(*await asyncio.open_connection(sock=connection, limit=BUFFER if slow else 2**16))

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def some(self, size: int) -> bytes:
        return await self._reader.read(size)

    async def answer(self, begun: float, pace: Pace | None = None) -> Answer:
        """The whole answer; IncompleteReadError or ConnectionError where it has no end."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        self.over = headers.get("connection") == "close"
        if headers.get("transfer-encoding") == "chunked":
            body = await self._chunks(pace)
        else:
            body = await self._reader.readexactly(int(headers["content-length"]))
        return Answer(int(head[0].split(" ")[1]), headers, body, begun, time.monotonic())

    async def _chunks(self, pace: Pace | None) -> bytes:
        parts = []
        while True:
            if pace is not None:
                await pace.pause()
            size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
            parts.append((await self._reader.readexactly(size + 2))[:-2])
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
