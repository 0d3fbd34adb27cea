"""A load of OpenAI's completions route: many streams at once, each of a fixed number of tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nxd_infer.cli.load.streams import Server, Stream


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


async def stream(
    port: int, prompt: Sequence[int], max_tokens: int, into: Stream | None = None, **fields: Any
) -> Stream:
    """Request exactly ``max_tokens`` greedy tokens, with further ``fields``; failures, such as fewer tokens, are in
    ``error``."""
    body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields}
    result = await Server(f"http://127.0.0.1:{port}").stream(body, into)
    if not result.error and result.tokens != max_tokens:
        result.error = f"{result.tokens} tokens instead of {max_tokens}"
    return result


def load(port: int, prompts: Sequence[Sequence[int]], max_tokens: int, timeout: float = 300.0, **fields: Any) -> Load:
    """Run one client per prompt, all at once. Raises SystemExit if one fails or the time is over."""

    async def everyone() -> list[Stream]:
        tasks = [stream(port, prompt, max_tokens, **fields) for prompt in prompts]
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
