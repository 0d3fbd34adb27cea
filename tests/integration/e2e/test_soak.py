"""What a soak (`make soak`) takes for a violation."""

from __future__ import annotations

import math
import socket

import pytest

from tests.soak.books import Books, read_metrics
from tests.soak.questions import Answer, Choice, Question, Told
from tests.soak.state import Soak, refused

ASKED = Question("/v1/completions", {"prompt": "a", "max_tokens": 2, "temperature": 0}, 1)
REFUSAL = b'{"error": {"message": "no", "type": "x", "param": null, "code": "x"}}'


def answer(status: int, body: bytes, seconds: float = 0.1) -> Answer:
    return Answer(status, {"content-type": "application/json", "x-request-id": "1"}, body, 10, 10 + seconds)


def completion(text: str, version: int = 0) -> Answer:
    body = b'{"choices": [{"index": 0, "text": "%s", "logprobs": null, "finish_reason": "length"}], '
    body += b'"usage": {"completion_tokens": 2}, "weight_version": %d}'
    return answer(200, body % (text.encode(), version))


@pytest.fixture
def soak():
    soak = Soak(0)
    soak.known = {(0, 0): Told([Choice("one", "length")], 2, 0), (0, 1): Told([Choice("two", "length")], 2, 1)}
    return soak


def test_an_answer_is_that_of_its_version(soak):
    assert soak.judge(0, ASKED, completion("one"), 0)
    with pytest.raises(AssertionError, match="another answer than alone"):
        soak.judge(0, ASKED, completion("two"), 0)
    with pytest.raises(AssertionError, match="version 1 answered"):
        soak.judge(0, ASKED, completion("two", 1), 0)
    soak.version, soak.checkpoints = 1, {0: 0, 1: 1}
    assert soak.judge(0, ASKED, completion("two", 1), 1)
    with pytest.raises(AssertionError, match="version 0 answered"):
        soak.judge(0, ASKED, completion("one"), 1)


def test_refusals_need_their_reason(soak):
    for wrong in (answer(503, REFUSAL), answer(504, REFUSAL, seconds=1.0)):
        with pytest.raises(AssertionError, match="not one of"):
            soak.judge(0, ASKED, wrong, 0)
    assert not soak.judge(0, ASKED, answer(504, REFUSAL, seconds=5.1), 0)
    soak.books.faults.append([9.0, math.inf])
    assert not soak.judge(0, ASKED, answer(503, REFUSAL), 0)
    for wrong in (answer(400, b"no"), answer(429, REFUSAL), answer(500, REFUSAL), answer(400, b'{"error": {}}')):
        with pytest.raises((AssertionError, ValueError, KeyError)):
            refused(wrong)


@pytest.mark.parametrize("said", ["", "content-length: 9\r\n\r\nx", "transfer-encoding: chunked\r\n\r\n1\r\nx\r\n"])
@pytest.mark.parametrize("ends", [True, False])
def test_an_answer_comes_whole_and_in_time(soak, said, ends):
    with socket.create_server(("127.0.0.1", 0)) as server:
        soak.port = server.getsockname()[1]
        wire, others = soak.connection(), []

        def send() -> None:
            wire.request("GET", "/livez")
            others.append(server.accept()[0])
            others[0].recv(1000)
            others[0].sendall(f"HTTP/1.1 200 OK\r\n{said}".encode())
            if ends:
                others[0].close()

        with pytest.raises(AssertionError, match="it was cut off" if ends else "not answered within"):
            soak.exchange(wire, send, "it", bound=0.2)
        others[0].close()
        wire.close()


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
    books.seen.update([404, 200])
    assert "answers of status 404 is 0, and should be 1" in said() and "status 200" not in said()
