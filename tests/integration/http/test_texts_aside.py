"""Templates and long texts run outside the server: they end, leave nothing behind, and delay nobody."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.http.http_servers import http_request, is_error, raw, toy_server, wait_for
from tests.support.processes import descendants, gone, stopped

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**variables):
    return {"messages": HELLO, "max_tokens": 3, "temperature": 0, "chat_template_kwargs": variables}


@pytest.fixture(scope="module")
def crowded():
    """One text may wait for another."""
    with toy_server(render_timeout=60, max_queued_requests=1, access_log=False) as server:
        yield server


def test_a_long_text_holds_up_nobody(toy):
    """What works on it is stopped, until others were answered. (A body of more than 64 KiB is parsed aside before.)"""
    assert toy.post("/tokenize", {"prompt": "hello " * 1000}).json()["count"] == 6000  # which starts the process
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        for child in descendants(toy.process.pid):
            held.enter_context(stopped(child))
        answer = pool.submit(toy.post, "/tokenize", {"prompt": "hello, you there. " * 3_500})
        toy.wait_metric("nxd_texts_aside", 1.0, kind="texts")
        assert toy.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}).status_code == 200
        assert not answer.done()
        held.close()
        assert answer.result().json()["count"] > 40_000


def test_a_template_without_an_end_is_400():
    """And a conversation's place in the lane is free again."""
    with toy_server(render_timeout=3.0, access_log=False) as server:
        for _ in range(2):
            error = is_error(server.post(CHAT, chat(spin=1)), 400, "messages")
            assert "did not come to an end within 3 s (render_timeout)" in error["message"]
        assert server.metric("nxd_texts_aside") == 0
        wait_for(lambda: server.post(CHAT, chat()).status_code == 200)


@pytest.mark.parametrize(
    ("variables", "param", "says"),
    [
        ({"self": 1}, "chat_template_kwargs", "must not set 'self'"),
        ({"times": 10**12}, "messages", "256 MiB of memory"),
        ({"flood": 1}, "messages", "makes more than 1048576 characters"),
        ({"index": 1}, "messages", "cannot render them"),
        (dict.fromkeys(map("v{}".format, range(100))), "chat_template_kwargs", "at most 64"),
    ],
)
def test_what_a_template_cannot_do_is_400(toy, variables, param, says):
    assert says in is_error(toy.post(CHAT, chat(**variables)), 400, param)["message"]
    assert toy.post(CHAT, chat()).status_code == 200


def test_a_template_ends_with_its_client_and_with_the_server():
    request = http_request(CHAT, json.dumps(chat(spin=1)).encode())
    with toy_server(render_timeout=600, drain_timeout=0.5) as server:
        with raw(server, request):
            wait_for(lambda: server.metric("nxd_texts_aside", kind="conversations") == 1)
            (child,) = descendants(server.process.pid)
            idle = processor_time(child)
            wait_for(lambda: processor_time(child) > idle + 0.1)  # the template spins
        server.wait_metric("nxd_texts_aside", 0.0, kind="conversations")
        assert gone(child, 60)
        assert server.post(CHAT, chat()).status_code == 200  # another has been started
        with raw(server, request):
            wait_for(lambda: server.metric("nxd_texts_aside", kind="conversations") == 1)
            children = descendants(server.process.pid)
            assert children and server.stop(signal.SIGTERM) == 0
        assert all(gone(pid, 60) for pid in children)


def processor_time(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


TEXT = {"prompt": "hello, you there. " * 50_000}
"""Close to the megabyte that is read at all."""


def large_body(server):
    """What parses such bodies runs."""
    is_error(server.post("/tokenize", {"prompt": "a", "secret": "b" * 2**17}), 400, code="unknown_parameter")


def test_abandoned_tokenisations_end_and_the_queue_of_them_is_bounded(crowded):
    """One is worked on and one waits; a third is 429. Their clients gone, nothing of them is left."""
    data = http_request("/tokenize", json.dumps(TEXT).encode())
    large_body(crowded)
    before = descendants(crowded.process.pid)
    for _ in range(2):
        with contextlib.ExitStack() as all:
            all.enter_context(raw(crowded, data))
            wait_for(lambda: descendants(crowded.process.pid) - before)
            (child,) = descendants(crowded.process.pid) - before
            all.enter_context(stopped(child))
            all.enter_context(raw(crowded, data))
            crowded.wait_metric("nxd_texts_aside", 2.0, kind="texts")
            is_error(crowded.post("/tokenize", TEXT), 429, code="queue_full")
        crowded.wait_metric("nxd_texts_aside", 0.0, kind="texts")
        wait_for(lambda: descendants(crowded.process.pid) <= before, message="a process for texts is left")


def test_no_threads_are_left_of_texts_that_are_tokenised_in_one(crowded):
    """The library started one per core and kept them."""
    tasks = f"/proc/{crowded.process.pid}/task"
    crowded.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
    before = len(os.listdir(tasks))
    is_error(crowded.post(COMPLETIONS, {"prompt": "a" * 10_000}), 400, "prompt", "context_length_exceeded")
    wait_for(lambda: len(os.listdir(tasks)) <= before, 60, "threads are left")


def test_what_a_long_text_took_is_given_back(toy):
    """The process that held it ends; a text that takes little leaves it running for the next."""
    large_body(toy)
    before = descendants(toy.process.pid)
    assert toy.post("/tokenize", TEXT).json()["count"] > 500_000
    assert descendants(toy.process.pid) <= before
    assert toy.post("/tokenize", {"prompt": "hello " * 1000}).json()["count"] == 6000
    assert len(descendants(toy.process.pid) - before) == 1
