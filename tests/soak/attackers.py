"""What an attacker does who has no more than an address: silence, bodies that take long to read, work for nobody."""

from __future__ import annotations

import asyncio
import json
import random

from tests.soak.questions import COMPLETIONS
from tests.soak.state import BODY_BYTES, Soak
from tests.soak.wire import request

CHAT = "/v1/chat/completions"


async def silent(soak: Soak, rng: random.Random) -> None:
    """Connections that never say what they want."""
    wires = [await soak.open() for _ in range(30)]
    try:
        for wire in wires:
            start = rng.choice((b"", b"G", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "))
            await soak.within("the start of a request", wire.send(start))
        await asyncio.sleep(rng.uniform(0.0, 2.0))
    except ConnectionError:  # one of them had to make room
        pass
    finally:
        for wire in wires:
            (wire.abort if rng.random() < 0.5 else wire.close)()


async def many_values(soak: Soak, rng: random.Random) -> None:
    """A legal body of as many small values as there is room for."""
    value = rng.choice((b"[1],", b"5,", b'"",', b"{},"))
    body = b'{"prompt": [' + value * ((BODY_BYTES - 100) // len(value)) + b"1]}"
    soak.allow(await soak.ask("POST", COMPLETIONS, body), "many values", 400)


async def odd_variable(soak: Soak, rng: random.Random) -> None:
    """Variables that the template cannot do anything with."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    answer = await soak.ask("POST", CHAT, json.dumps(body | {"chat_template_kwargs": {"self": 1}}).encode())
    soak.allow(answer, "a variable of no template", 400)


async def abandoned_text(soak: Soak, rng: random.Random) -> None:
    """A long text to tokenise, whose answer nobody waits for."""
    body = json.dumps({"prompt": "while it runs, it runs. " * rng.randint(1000, 20_000)}).encode()
    soak.books.sent["/tokenize"] += 1
    soak.books.left["/tokenize"] += 1
    wire = await soak.open()
    try:
        await soak.within("sending /tokenize", wire.send(request("POST", "/tokenize", body)))
        await asyncio.sleep(rng.uniform(0.0, 0.3))
    except ConnectionError:  # it was refused while it came
        pass
    finally:
        wire.abort()
