"""The traffic: each kind is one thing that some client does, from its first byte to its last."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from tests.soak.books import check_any_moment
from tests.soak.questions import CHAT, COMPLETIONS, Question, question
from tests.soak.state import BODY_BYTES, QUEUE, REQUEST_TIMEOUT, SLOTS, Soak, refused, route_of
from tests.soak.wire import Violation, all_of, request


async def client(soak: Soak, rng: random.Random, until: float) -> None:
    """Do one thing after the other until the moment ``until``."""
    kinds, weights = list(KINDS), list(KINDS.values())
    while time.monotonic() < until:
        (kind,) = rng.choices(kinds, weights)
        soak.books.kinds[kind.__name__] += 1
        await kind(soak, rng)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.expovariate(20))


async def _question(soak: Soak, place: int | None, asked: Question, *, stream: bool, **more: Any) -> None:
    version = soak.version
    answer = await soak.ask("POST", asked.path, asked.bytes(stream), **more)
    soak.judge(place, asked, answer, version)
    if answer.status in (429, 503):
        await asyncio.sleep(0.1)


def _known(soak: Soak, rng: random.Random) -> tuple[int, Question]:
    place = rng.randrange(len(soak.questions))
    return place, soak.questions[place]


async def ask(soak: Soak, rng: random.Random) -> None:
    await _question(soak, *_known(soak, rng), stream=rng.random() < 0.5)


async def slow(soak: Soak, rng: random.Random) -> None:
    """A stream that is read with pauses."""
    await _question(soak, *_known(soak, rng), stream=True, pause=rng.uniform(0.0, 0.04))


async def unseeded(soak: Soak, rng: random.Random) -> None:
    asked = question(rng, exact=False, model=rng.choice((None, None, "x", "z")))
    await _question(soak, None, asked, stream=rng.random() < 0.5)


async def several(soak: Soak, rng: random.Random) -> None:
    """One connection for one request after the other."""
    wire = await soak.open()
    try:
        for _ in range(rng.randint(2, 4)):
            await _question(soak, *_known(soak, rng), stream=rng.random() < 0.5, wire=wire)
            if wire.over:
                return
    finally:
        wire.close()


async def burst(soak: Soak, rng: random.Random) -> None:
    """More at once than there is room for, and some that take longer than they may."""
    asked = [_known(soak, rng) for _ in range(rng.randint(5, 25))]
    giants = [(None, question(rng, exact=False, long=True)) for _ in range(rng.randint(0, 5))]
    await all_of(*(_question(soak, place, one, stream=rng.random() < 0.5) for place, one in [*asked, *giants]))


async def leave(soak: Soak, rng: random.Random) -> None:
    """Ask, read some of it or nothing, and go."""
    _, asked = _known(soak, rng)
    if rng.random() < 0.3:
        asked = question(rng, exact=False, long=True)
    soak.books.incomplete(asked)
    data = request("POST", asked.path, asked.bytes(rng.random() < 0.7), "Connection: close")
    soak.books.sent[route_of(asked.path)] += 1
    soak.books.left[route_of(asked.path)] += 1
    wire = await soak.open()
    try:
        await soak.within("leaving", wire.send(data if rng.random() < 0.8 else data[: -rng.randint(1, 20)]))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0.0, 0.5))
        else:
            some = wire.reader.read(rng.choice((1, 300, 3000)))
            await soak.within(f"the start of an answer to {data[:600]!r}", some, REQUEST_TIMEOUT + soak.bound)
    except ConnectionError:  # an answer that was over, and the connection with it
        pass
    finally:
        (wire.abort if rng.random() < 0.5 else wire.close)()


async def half(soak: Soak, rng: random.Random) -> None:
    """A body that never ends gets an error at the deadline."""
    soak.books.sent[COMPLETIONS] += 1
    begun = time.monotonic()
    wire = await soak.open()
    try:
        data = request("POST", COMPLETIONS, b'{"prompt": "half", "max_tokens": 3}')[: -rng.randint(1, 30)]
        await soak.within("sending half a request", wire.send(data))
        answer = await soak.within("half a request", wire.answer(begun))
    except (OSError, EOFError) as error:
        raise Violation(f"half a request was not refused ({error!r})") from error
    finally:
        wire.close()
    soak.books.seen[COMPLETIONS, answer.status] += 1
    refused(answer)
    soak.allow(answer, "half a request")


def _wrong(status: int = 400, **body: Any) -> tuple[str, str, bytes, int]:
    return "POST", COMPLETIONS, json.dumps({"prompt": "a", "max_tokens": 2} | body).encode(), status


MALFORMED = [
    *(_wrong(**{name: value}) for name, value in (
        ("temperature", "hot"), ("n", 1000), ("max_tokens", 10**6), ("prompt", []), ("prompt", [5] * 257),
        ("prompt", [1] * 300_000), ("prompt", "\ud800"), ("stop", ["a"] * 2000), ("min_tokens", 3),
        ("structured_outputs", {"grammar": "start: nothing"}), ("secret", 1),
    )),
    _wrong(404, model="nobody"),
    _wrong(413, prompt="a" * 2 * BODY_BYTES),
    ("POST", COMPLETIONS, b"{", 400),
    ("POST", COMPLETIONS, b'{"prompt": "\xff"}', 400),
    ("POST", COMPLETIONS, b"[" * 5000, 400),
    ("POST", CHAT, b'{"messages": [{"role": "nobody", "content": 1}]}', 400),
    ("POST", "/v1/embeddings", b'{"input": "a"}', 400),
    ("POST", "/v1/weights", b'{"path": "other"}', 401),
    ("GET", COMPLETIONS, b"", 405),
    ("PUT", "/nowhere", b"x", 404),
]  # fmt: skip


async def malformed(soak: Soak, rng: random.Random) -> None:
    method, path, body, status = rng.choice(MALFORMED)
    soak.allow(await soak.ask(method, path, body), (method, path, body[:200]), status)


async def look(soak: Soak, rng: random.Random) -> None:
    """What a load balancer and a scraper do."""
    path = rng.choice(("/metrics", "/health", "/readyz", "/livez", "/v1/models", "/v1/adapters"))
    answer = await soak.ask("GET", path)
    soak.allow(answer, path, 200)
    if path == "/metrics":
        check_any_moment(answer.body.decode(), SLOTS, QUEUE)


KINDS: dict[Callable[[Soak, random.Random], Awaitable[None]], float] = {
    ask: 60, unseeded: 8, several: 8, leave: 9, slow: 4, malformed: 10, half: 0.5, look: 6, burst: 1.5,
}  # fmt: skip
