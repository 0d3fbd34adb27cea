"""Measure a server while clients misuse it: latency of ``/livez``, and pauses of a running stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from bench import report
from bench.artifacts import artifact
from bench.client import Stream, stream
from bench.options import Options
from bench.process_groups import memory_to_hold
from bench.server import Server

SECONDS, QUICK_SECONDS = 5.0, 1.0
LIVEZ_SECONDS, GAP_STEPS = 0.1, 5.0
"""Limits that must hold beside each attack."""
DESCRIPTORS, IDLE, SLOW = 256, 220, 60
"""The server's limit of open files; connections of ``idle``, and of those that trickle."""
TOKENS, PAUSE = 400, 0.02
COMPLETIONS = "/v1/completions"


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n".encode() + body


def idle(port: int, until: float) -> None:
    """Hold silent connections; reopen those that the server closes."""
    _hold(port, until, IDLE, b"", b"")


def slow_heads(port: int, until: float) -> None:
    """Send heads byte by byte."""
    _hold(port, until, SLOW, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", b"a")


def slow_bodies(port: int, until: float) -> None:
    """Send bodies byte by byte."""
    _hold(port, until, SLOW, request(COMPLETIONS, b'{"prompt": "', 10**6), b"a")


def _hold(port: int, until: float, count: int, opening: bytes, drop: bytes) -> None:
    held: list[socket.socket] = []
    while time.monotonic() < until:
        for connection in list(held):
            try:
                if drop:
                    connection.sendall(drop)
                with contextlib.suppress(BlockingIOError):
                    if not connection.recv(4096, socket.MSG_DONTWAIT):
                        raise ConnectionError
            except OSError:
                held.remove(connection)
                connection.close()
        with contextlib.suppress(OSError):
            while len(held) < count and time.monotonic() < until:
                held.append(socket.create_connection(("127.0.0.1", port), 60))
                held[-1].sendall(opening)
        time.sleep(0.2)
    for connection in held:
        connection.close()


def large_lists(port: int, until: float) -> None:
    """Send prompts of as many ids as a body may hold."""
    body = b'{"prompt": [' + b",".join([b"[12345]"] * 2**17) + b"]}"
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60) as connection:
            connection.sendall(request(COMPLETIONS, body))
            while connection.recv(65536):
                pass


def abandoned_texts(port: int, until: float) -> None:
    """Ask to tokenize long texts, six at a time, and leave."""
    body = json.dumps({"prompt": "while it runs. " * 2**16}).encode()
    _leave(port, until, request("/tokenize", body), 6, 0.1)


def aborted_streams(port: int, until: float) -> None:
    """Open streams, and leave."""
    body = json.dumps({"prompt": "hello", "max_tokens": 40, "stream": True, "ignore_eos": True}).encode()
    _leave(port, until, request(COMPLETIONS, body), 1, 0.05)


def _leave(port: int, until: float, data: bytes, count: int, after: float) -> None:
    while time.monotonic() < until:
        with contextlib.suppress(OSError), contextlib.ExitStack() as connections:
            for _ in range(count):
                one = connections.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                one.sendall(data)
            time.sleep(after)


def nothing(port: int, until: float) -> None:
    """Do nothing: what the machine itself costs."""
    time.sleep(max(0.0, until - time.monotonic()))


ATTACKS: dict[str, Callable[[int, float], None]] = {
    attack.__name__.replace("_", " "): attack
    for attack in (nothing, idle, slow_heads, slow_bodies, large_lists, abandoned_texts, aborted_streams)
}


@dataclass
class Reading:
    """What other clients saw beside one attack."""

    livez: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: int = 0


async def _livez(port: int, until: float, reading: Reading) -> None:
    """Probe again and again, each time on a new connection, like a kubelet."""
    while time.monotonic() < until:
        begin = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if not (await reader.read()).startswith(b"HTTP/1.1 200 "):
            reading.errors.append("/livez was refused")
        writer.close()
        reading.livez.append(time.perf_counter() - begin)
        await asyncio.sleep(PAUSE)


async def _streams(port: int, until: float, reading: Reading) -> None:
    while time.monotonic() < until:
        one = Stream(0.0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stream(port, [5] * 8, TOKENS, one), max(0.1, until - time.monotonic()))
        reading.gaps += one.gaps
        reading.errors += [one.error] if one.error else []


def beside(attack: Callable[[int, float], None], port: int, seconds: float) -> Reading:
    """Return what others see while ``attack`` runs in a process of its own."""
    reading, until = Reading(), time.monotonic() + seconds
    attacker = multiprocessing.get_context("spawn").Process(target=attack, args=(port, until), daemon=True)
    attacker.start()

    async def watch() -> None:
        await asyncio.gather(_livez(port, until, reading), _streams(port, until, reading))

    asyncio.run(watch())
    attacker.join(60)
    attacker.kill()
    return reading


def run(options: Options) -> None:
    tp, seconds = options.degrees[0], QUICK_SECONDS if options.quick else SECONDS
    few = ("/bin/sh", "-c", f'ulimit -n {DESCRIPTORS} && exec "$@"', "sh")
    readings: dict[str, Reading] = {}
    with Server(artifact(options, tp), arguments=("--header-timeout", "2"), within=few) as server:
        for name, attack in ATTACKS.items():
            readings[name] = beside(attack, server.port, seconds)
            readings[name].memory = memory_to_hold(server.pid)
    step = statistics.fmean(readings["nothing"].gaps)  # tokens of fast steps come several at once
    rows, wrong = [], []
    for name, reading in readings.items():
        livez, steps = max(reading.livez, default=0.0), max(reading.gaps, default=0.0) / step
        memory = f"{reading.memory / 2**20:.0f}"
        rows.append((name, f"{1e3 * livez:.0f}", f"{steps:.1f}", memory, str(len(reading.errors))))
        if name != "nothing" and (reading.errors or livez > LIVEZ_SECONDS or steps > GAP_STEPS):
            wrong.append(name)
    columns = ("attack", "/livez at most, ms", "longest gap, steps", "MiB after", "errors")
    figures = {"tp": tp, "step": step, "attacks": {name: asdict(one) for name, one in readings.items()}}
    title = f"Attacks on a server at tp {tp}, {seconds:g} s each"
    report.write("attacks", title, columns, rows, figures, settings=options.settings())
    if wrong and not options.quick:
        raise SystemExit(f"beyond {1e3 * LIVEZ_SECONDS:.0f} ms or {GAP_STEPS:g} steps: {', '.join(wrong)}")
