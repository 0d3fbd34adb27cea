"""Chat templates run outside the server: they end, leave nothing behind, and delay nobody."""

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

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def chat(**variables):
    return {"messages": HELLO, "max_tokens": 3, "temperature": 0, "chat_template_kwargs": variables}


def test_a_conversation_holds_up_nobody(toy):
    """What renders it is stopped, until others were answered."""
    assert toy.post(CHAT, chat()).status_code == 200  # which starts the process
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as held:
        for child in descendants(toy.process.pid):
            held.enter_context(stopped(child))
        answer = pool.submit(toy.post, CHAT, chat())
        toy.wait_metric("nxd_texts_aside", 1.0, kind="conversations")
        assert toy.post("/v1/completions", {"prompt": "hello", "max_tokens": 2}).status_code == 200
        assert not answer.done()
        held.close()
        assert answer.result().status_code == 200


def test_conversations_that_find_no_room_to_wait_are_429():
    with toy_server(render_timeout=60, max_queued_requests=1, access_log=False) as server:
        server.post(CHAT, chat())
        (child,) = descendants(server.process.pid)
        request = http_request(CHAT, json.dumps(chat()).encode())
        with stopped(child), raw(server, request), raw(server, request):
            server.wait_metric("nxd_texts_aside", 2.0, kind="conversations")
            is_error(server.post(CHAT, chat()), 429, code="queue_full")
        server.wait_metric("nxd_texts_aside", 0.0)  # their clients gone, nothing of them is left


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


def test_no_threads_are_left_of_texts_that_are_tokenised_in_one(toy):
    """The library started one per core and kept them."""
    tasks = f"/proc/{toy.process.pid}/task"
    toy.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    before = len(os.listdir(tasks))
    is_error(toy.post("/v1/completions", {"prompt": "a" * 10_000}), 400, "prompt", "context_length_exceeded")
    wait_for(lambda: len(os.listdir(tasks)) <= before + 1, 60, "threads are left")  # the server's own stays
