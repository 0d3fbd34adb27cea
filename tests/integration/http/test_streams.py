"""Clients that leave, steps that fail, slow streams: slots come back, and no half answer looks whole."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time

import httpx
import openai
import pytest

from tests.support.http.http_servers import events_of, http_request, is_error, raw, read_all, toy_server, wait_for

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 7900, "temperature": 0, "ignore_eos": True}
"""It does not end by itself while a test looks at it."""


def idle(server):
    return server.metric("nxd_num_requests_running") == 0 and server.metric("nxd_slots_free") == 4


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("stream", "reset", "next_request"),
    [(True, False, b""), (True, True, b"G"), (False, True, b""), (False, False, b"")],
)
def test_a_client_that_leaves_frees_its_slot(slow_toy, stream, reset, next_request):
    left = slow_toy.metric("nxd_client_disconnects_total")
    cancelled = slow_toy.metric("nxd_request_success_total", finished_reason="cancelled")
    body = json.dumps({**LONG, "stream": stream}).encode()
    with raw(slow_toy, http_request(COMPLETIONS, body)) as connection:
        slow_toy.wait_metric("nxd_num_requests_running", 1)
        data = b""
        while stream and data.count(b"data: ") < 10:  # one by one: the end is minutes away
            data += connection.recv(65536)
        connection.sendall(next_request)  # no more is read until the answer is complete
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: idle(slow_toy), message="the slot of a client that left")
    slow_toy.wait_metric("nxd_request_success_total", cancelled + 1, finished_reason="cancelled")
    assert slow_toy.metric("nxd_client_disconnects_total") == left + 1
    assert "Traceback" not in slow_toy.log


def test_all_of_a_requests_choices_are_cancelled_and_the_queue_too(slow_toy):
    body = json.dumps({**LONG, "prompt": ["hello"] * 4, "n": 3, "stream": True}).encode()
    with raw(slow_toy, http_request(COMPLETIONS, body)):
        slow_toy.wait_metric("nxd_num_requests_running", 4)
        assert slow_toy.metric("nxd_num_requests_waiting") == 8
    wait_for(lambda: idle(slow_toy) and slow_toy.metric("nxd_num_requests_waiting") == 0)


def test_a_client_that_leaves_in_the_middle_of_its_body(slow_toy):
    data = http_request(COMPLETIONS, b'{"prompt": ').replace(b"Content-Length: 11", b"Content-Length: 5000")
    there = slow_toy.metric("nxd_connections")
    with raw(slow_toy, data):
        slow_toy.wait_metric("nxd_connections", there + 1)
    slow_toy.wait_metric("nxd_connections", there)
    assert slow_toy.get("/readyz").status_code == 200
    assert "Traceback" not in slow_toy.log and " 500 " not in slow_toy.log
    assert idle(slow_toy)


def test_a_silent_stream_is_kept_open_by_comments(tmp_path):
    hold = tmp_path / "hold"
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0, "stream": True}
    with toy_server(arguments=("--fail-file", str(hold)), keep_alive_interval=0.15) as server:
        hold.write_text("hold")
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
            text = ""
            for part in response.iter_text():
                text += part
                if text.count(": keep-alive\n\n") >= 3:
                    hold.unlink(missing_ok=True)
        assert text.count(": keep-alive\n\n") >= 3
        assert events_of(text)[-1] == "[DONE]"


def test_a_client_that_never_reads_loses_its_connection_and_a_slow_one_does_not():
    """Neither holds a slot; the first would hold its half of an answer for as long as it liked."""
    toy = {"delay": 0.0, "max_len": 4000}
    body = json.dumps({**LONG, "max_tokens": 3900, "n": 4, "logprobs": 5, "stream": True}).encode()
    request = http_request(COMPLETIONS, body, "Connection: close")
    with (
        toy_server(toy=toy, connection_timeout=20, keep_alive_interval=10) as server,
        raw(server, request, receive_buffer=4096),
        raw(server, request) as slow,
    ):
        got = b""
        while f"{COMPLETIONS} 499" not in server.log:  # until the server has waited for the one that reads nothing
            got += slow.recv(32768)
            time.sleep(0.2)
        got += read_all(slow)
        assert got.count(b'"finish_reason":"length"') == 4 and b"data: [DONE]" in got
        assert server.metric("nxd_slots_free") == 4


def test_a_client_that_reads_until_the_deadline_of_its_request_loses_its_connection_too():
    """The answer is long enough to fill all buffers before its deadline. One that the machine was too slow for may be
    read to its end: then the deadline was too near, and is further away the next time."""
    deadline = 10
    while not is_cut(deadline):
        deadline *= 4
        assert deadline < 200


def is_cut(deadline: int) -> bool:
    body = json.dumps({**LONG, "max_tokens": 3900, "n": 4, "logprobs": 20, "stream": True}).encode()
    with (
        toy_server(toy={"delay": 0.0, "max_len": 4000}, connection_timeout=2, request_timeout=deadline) as server,
        raw(server, http_request(COMPLETIONS, body, "Connection: close"), receive_buffer=4096) as connection,
    ):
        end = time.monotonic() + deadline + 90
        with contextlib.suppress(ConnectionResetError):  # it is cut first, and told then
            while f"{COMPLETIONS} 499" not in server.log and (data := connection.recv(8000)):
                assert b"[DONE]" not in data and time.monotonic() < end
                time.sleep(0.2)
        wait_for(lambda: f"POST {COMPLETIONS} " in server.log)
        return f"{COMPLETIONS} 499" in server.log


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A server whose steps fail as the file says: once, value, hang."""
    file = tmp_path_factory.mktemp("fail") / "fail"
    with toy_server(
        toy={"delay": 0.02, "max_len": 8000}, arguments=("--fail-file", str(file)), max_restarts=20, log_format="json"
    ) as server:
        yield server, file


def test_a_stream_that_a_failure_cuts_has_no_end_to_mistake(failing):
    server, file = failing
    with raw(server, http_request(COMPLETIONS, json.dumps({**LONG, "stream": True}).encode())) as connection:
        data = connection.recv(65536)
        while b"data: " not in data:
            data += connection.recv(65536)
        file.write_text("once")
        while b"0\r\n\r\n" not in data:
            part = connection.recv(65536)
            assert part
            data += part
    assert b'data: {"error":' in data
    assert b"[DONE]" not in data and b'"finish_reason":"' not in data
    server.wait_ready()
    assert server.metric("nxd_engine_restarts_total") >= 1
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        more = {"ignore_eos": True}
        stream = client.completions.create(model="toy", prompt="hello", max_tokens=7900, stream=True, extra_body=more)
        with pytest.raises(openai.APIError):
            for count, _ in enumerate(stream):
                if count == 2:
                    file.write_text("once")
    server.wait_ready()


def test_a_failure_before_the_first_token_is_a_status_of_its_own(failing):
    server, file = failing
    server.wait_ready()
    for stream in (True, False):
        file.write_text("once")
        response = server.post(COMPLETIONS, {**LONG, "stream": stream})
        is_error(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        server.wait_ready()


def test_a_step_that_refuses_one_request_leaves_the_ranks_alone(failing):
    server, file = failing
    server.wait_ready()
    restarts = server.metric("nxd_engine_restarts_total")
    file.write_text("value")
    try:
        is_error(server.post(COMPLETIONS, {**LONG, "max_tokens": 3}), 500)
    finally:
        file.unlink()
    assert server.post(COMPLETIONS, {**LONG, "max_tokens": 3}).status_code == 200
    assert server.metric("nxd_engine_restarts_total") == restarts
    for line in server.lines:
        if "nxd_server" in line:
            assert json.loads(line)["level"]
