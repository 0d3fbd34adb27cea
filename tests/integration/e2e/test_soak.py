"""The soak itself: a short one holds, and one that sees something wrong ends with a status that says so."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time

import pytest

from tests.soak.books import Books, Fault, read_metrics
from tests.soak.clients import client, look
from tests.soak.questions import Choice, Question, Told
from tests.soak.state import Soak, refused
from tests.soak.tasks import all_of, end, waiting
from tests.soak.wire import Answer, Violation
from tests.support.e2e.command import ROOT


def test_a_short_soak_holds():
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.3", "--seed", "7", "--grace", "20", "--no-sieges"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    assert "soak: seed 7 held for 0.3 minutes" in done.stdout


ASKED = Question("/v1/completions", {"prompt": "a", "max_tokens": 2, "temperature": 0}, 1, True)


def answer(status: int, body: bytes, seconds: float = 0.1, **headers: str) -> Answer:
    return Answer(status, {"content-type": "application/json", "x-request-id": "1", **headers}, body, 10, 10 + seconds)


def completion(text: str, version: int = 0) -> Answer:
    body = b'{"choices": [{"index": 0, "text": "%s", "logprobs": null, "finish_reason": "length"}], '
    body += b'"usage": {"completion_tokens": 2}, "weight_version": %d}'
    return answer(200, body % (text.encode(), version), **{"x-weight-version": str(version)})


@pytest.fixture
def soak():
    soak = Soak(0)
    soak.known = {(0, 0): Told([Choice("one", "length")], 2, 0), (0, 1): Told([Choice("two", "length")], 2, 1)}
    return soak


def test_an_answer_is_that_of_its_version(soak):
    assert soak.judge(0, ASKED, completion("one"), 0)
    with pytest.raises(Violation, match="another answer than alone"):
        soak.judge(0, ASKED, completion("two"), 0)
    with pytest.raises(Violation, match="version 1 answered"):
        soak.judge(0, ASKED, completion("two", 1), 0)
    soak.version, soak.checkpoints = 1, {0: 0, 1: 1}
    assert soak.judge(0, ASKED, completion("two", 1), 1)
    with pytest.raises(Violation, match="version 0 answered"):
        soak.judge(0, ASKED, completion("one"), 1)


REFUSAL = b'{"error": {"message": "no", "type": "x", "param": null, "code": "x"}}'


def test_refusals_need_their_reason(soak):
    with pytest.raises(Violation, match="not one of"):
        soak.judge(0, ASKED, answer(503, REFUSAL), 0)
    with pytest.raises(Violation, match="not one of"):
        soak.judge(0, ASKED, answer(504, REFUSAL, seconds=1.0), 0)
    assert not soak.judge(0, ASKED, answer(504, REFUSAL, seconds=5.1), 0)
    soak.books.begin_fault().begun = 9.0
    assert not soak.judge(0, ASKED, answer(503, REFUSAL), 0)
    for wrong in (answer(400, b"no"), answer(429, REFUSAL), answer(500, REFUSAL), answer(400, b'{"error": {}}')):
        with pytest.raises(Violation, match="no proper refusal"):
            refused(wrong)


def test_a_rank_that_stops_for_a_moment_excuses_readiness_alone(soak, monkeypatch):
    async def ask(*_: object) -> Answer:
        return answer(503, REFUSAL)

    monkeypatch.setattr(soak, "ask", ask)
    rng = random.Random(0)
    monkeypatch.setattr(rng, "choice", lambda paths: "/readyz")
    with pytest.raises(Violation, match="not one of"):
        asyncio.run(look(soak, rng))
    soak.books.stalls.append(Fault(9.0, 11.0))
    asyncio.run(look(soak, rng))
    with pytest.raises(Violation, match="not one of"):
        soak.judge(0, ASKED, answer(503, REFUSAL), 0)


def test_nobody_answers_in_time(soak):
    async def ask() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server:
            soak.port = server.sockets[0].getsockname()[1]
            await soak.ask("GET", "/livez", bound=0.2)

    with pytest.raises(Violation, match="not answered within"):
        asyncio.run(ask())


def test_who_asks_ends_whenever_it_is_told_to(soak):
    async def livez(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1000):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def for_ever() -> None:
        while True:
            await soak.ask("GET", "/livez")
            await asyncio.sleep(60)

    async def told_after(turns: int) -> None:
        task = asyncio.ensure_future(for_ever())
        for _ in range(turns):
            await asyncio.sleep(0)
        await end(task)

    async def main() -> None:
        async with await asyncio.start_server(livez, "127.0.0.1", 0) as server:
            soak.port = server.sockets[0].getsockname()[1]
            await asyncio.wait_for(all_of(*map(told_after, range(60))), 120)

    asyncio.run(main())


def test_a_client_that_waits_is_told(soak, monkeypatch):
    async def main() -> str:
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
            soak.port = server.sockets[0].getsockname()[1]
            rng = random.Random(0)
            monkeypatch.setattr(rng, "choices", lambda *_: [look])
            task = asyncio.ensure_future(client(soak, rng, time.monotonic() + 60))
            await asyncio.sleep(0.2)
            said = waiting()
            await end(task)
            return said

    said = asyncio.run(main())
    assert re.search(
        r", look 1 since [\d:]+, GET /\S+ since [\d:]+: client:\d+ > look:\d+ > ask:\d+ > wait_for", said
    ), said


def test_counters_that_disagree_are_told():
    books = Books()
    idle = {"nxd_ready": 1, "nxd_slots_free": 8, "nxd_weight_version": 2}

    def said(**more: float) -> str:
        text = "".join(f"{name} {value}\n" for name, value in {**idle, **more}.items())
        return books.disagreement(read_metrics(text), slots=8, version=2)

    assert said() == ""
    assert "nxd_slots_free is 7, and should be 8" in said(nxd_slots_free=7)
    assert "nxd_generation_tokens_total is 5, and should be 0" in said(nxd_generation_tokens_total=5)
    books.incomplete(ASKED)
    assert "should be 0 to 2" in said(nxd_generation_tokens_total=5) and said(nxd_generation_tokens_total=2) == ""
    books.sent["/livez"] += 1
    assert "requests of /livez is 0, and should be 1" in said()
