"""Measure how long a server takes to be ready again after losing a rank under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

from bench.client import Stream, stream
from bench.model import prompts
from bench.process_groups import tree
from bench.server import Server
from nxd_infer.cli.load.served import ready

STREAMS, PROMPT = 4, 64
DOWN_SECONDS, AGAIN_SECONDS = 300.0, 300.0
"""Most seconds until a lost rank is noticed, and until a server is ready again."""


async def again_after(loss: signal.Signals, server: Server, model: Path, number: int) -> float:
    """Return the seconds from the signal ``loss`` to a rank, under streams, until the server is ready again."""
    streams = [Stream(0.0) for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(stream(server.port, prompt, 256, into))
        for prompt, into in zip(prompts(model, STREAMS, PROMPT, 100 + number), streams, strict=True)
    ]
    while not all(one.times or one.error for one in streams):
        await asyncio.sleep(0.01)
    begin = time.perf_counter()
    ranks = ranks_of(server.pid)
    os.kill(ranks[-1 - number % len(ranks)], loss)
    try:
        await _until(server, False, DOWN_SECONDS)
        await _until(server, True, AGAIN_SECONDS)
        return time.perf_counter() - begin
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def ranks_of(pid: int) -> list[int]:
    """Return the rank processes of a server, by the name that each gives itself."""
    found = []
    for process in tree(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/comm").read_text().startswith("nxd rank "):
                found.append(process)
    return found


async def _until(server: Server, wanted: bool, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while await asyncio.to_thread(ready, server.port) is not wanted:
        if not server.alive() or time.perf_counter() > end:
            raise SystemExit(f"the server was not ready again after a rank's death:\n{server.tail()}")
        await asyncio.sleep(0.01)
