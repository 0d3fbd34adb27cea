"""What a soak (`make soak`) takes for a violation, and that it ends whenever it is told to."""

from __future__ import annotations

import asyncio

import pytest

from tests.soak.books import Books, read_metrics
from tests.soak.questions import Choice, Question, Told
from tests.soak.state import Soak, refused
from tests.soak.wire import Answer, Violation, all_of, end, waiting

ASKED = Question("/v1/completions", {"prompt": "a", "max_tokens": 2, "temperature": 0}, 1, True)
REFUSAL = b'{"error": {"message": "no", "type": "x", "param": null, "code": "x"}}'


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


def test_refusals_need_their_reason(soak):
    for wrong in (answer(503, REFUSAL), answer(504, REFUSAL, seconds=1.0)):
        with pytest.raises(Violation, match="not one of"):
            soak.judge(0, ASKED, wrong, 0)
    assert not soak.judge(0, ASKED, answer(504, REFUSAL, seconds=5.1), 0)
    soak.books.begin_fault().begun = 9.0
    assert not soak.judge(0, ASKED, answer(503, REFUSAL), 0)
    for wrong in (answer(400, b"no"), answer(429, REFUSAL), answer(500, REFUSAL), answer(400, b'{"error": {}}')):
        with pytest.raises(Violation, match="no proper refusal"):
            refused(wrong)


def test_nobody_answers_in_time_and_who_waits_is_told_and_ends(soak):
    async def main() -> None:
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
            soak.port = server.sockets[0].getsockname()[1]
            with pytest.raises(Violation, match=r"GET /livez .*not answered within 0\.2 s"):
                await soak.ask("GET", "/livez", bound=0.2)
            asking = [asyncio.ensure_future(soak.ask("GET", "/livez")) for _ in range(9)]
            await asyncio.sleep(0)
            assert "ask:" in waiting()
            await asyncio.wait_for(all_of(*(end(task) for task in asking)), 120)

    asyncio.run(main())


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
