"""The load client against a real socket that answers as the server does, and as a broken one would."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.client import Stream, checked, stream


def event(text: str = "", usage: int | None = None) -> bytes:
    choices = [{"index": 0, "text": text}] if usage is None else []
    return (
        b"data: " + json.dumps({"choices": choices, "usage": usage and {"completion_tokens": usage}}).encode() + b"\n\n"
    )


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))


OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
BOTH = event("a") + event("b")
ANSWERS = {
    "whole": (OK + chunked(event("a"), b": keep-alive\n\n", event("b"), event(usage=2), DONE), ""),
    "split inside an event": (OK + chunked(BOTH[:20], BOTH[20:] + event(usage=2)[:9], event(usage=2)[9:] + DONE), ""),
    "no end": (OK + chunked(event("a"), event("b")), "without [DONE]"),
    "cut off": (OK + chunked(event("a"))[:-5] + b"40\r\nda", "IncompleteReadError"),
    "too few tokens": (OK + chunked(event("a"), event(usage=1), DONE), "1 tokens instead of 2"),
    "refused": (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 5\r\n\r\nlater", "status 429: later"),
    "error in the stream": (OK + chunked(b'data: {"error": {"message": "broke"}}\n\n'), "broke"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_streams_are_read_and_faults_are_named(case: str):
    answer, fault = ANSWERS[case]
    asked: list[dict] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next(line for line in head.splitlines() if line.startswith("Content-Length")).split()[1])
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> Stream:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with server:
            return await asyncio.wait_for(stream(server.sockets[0].getsockname()[1], [7, 8, 9], 2), 120)

    result = asyncio.run(main())
    assert asked[0]["prompt"] == [7, 8, 9] and asked[0]["max_tokens"] == 2 and asked[0]["ignore_eos"]
    if fault:
        assert fault in result.error
        with pytest.raises(SystemExit, match="stream 0 of 1"):
            checked([result], 0.0)
    else:
        assert result.error == "" and result.tokens == 2 and len(result.times) == 2
        assert result.sent < result.times[0] <= result.times[1]
        load = checked([result], 0.1)
        assert load.rate == pytest.approx(2 / (result.times[1] - result.sent))
