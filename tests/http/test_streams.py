"""Clients that leave, steps that fail, slow streams: slots come back, and no half answer looks whole."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import httpx
import openai
import pytest

from tests.http.http_servers import events_of, http_request, is_error, raw, read_all, toy_server, wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "hello", "max_tokens": 350, "temperature": 0, "ignore_eos": True}


def idle(server):
    return server.metric("nxd_num_requests_running") == 0 and server.metric("nxd_slots_free") == 4


@pytest.mark.parametrize("stream", [pytest.param(True, marks=pytest.mark.check), False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_leaves_frees_its_slot(slow_toy, stream, reset):
    left = slow_toy.metric("nxd_client_disconnects_total")
    cancelled = slow_toy.metric("nxd_request_success_total", finished_reason="cancelled")
    body = json.dumps({**LONG, "stream": stream}).encode()
    with raw(slow_toy, http_request(COMPLETIONS, body)) as connection:
        wait_for(lambda: slow_toy.metric("nxd_num_requests_running") == 1, 5)
        while stream and b"data: " not in connection.recv(65536):  # the head may come alone
            continue
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: idle(slow_toy), 3, "the slot of a client that left")
    assert slow_toy.metric("nxd_client_disconnects_total") == left + 1
    assert slow_toy.metric("nxd_request_success_total", finished_reason="cancelled") == cancelled + 1
    assert "Traceback" not in slow_toy.log


def test_all_of_a_requests_choices_are_cancelled_and_the_queue_too(slow_toy):
    body = json.dumps({**LONG, "prompt": ["hello"] * 4, "n": 3, "stream": True}).encode()
    with raw(slow_toy, http_request(COMPLETIONS, body)):
        wait_for(lambda: slow_toy.metric("nxd_num_requests_running") == 4, 5)
        assert slow_toy.metric("nxd_num_requests_waiting") == 8
    wait_for(lambda: idle(slow_toy) and slow_toy.metric("nxd_num_requests_waiting") == 0, 3)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_client_that_leaves_in_the_middle_of_its_body(slow_toy, chunked):
    if chunked:
        data = f'POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{{"pro'.encode()
    else:
        data = http_request(COMPLETIONS, b'{"prompt": ').replace(b"Content-Length: 11", b"Content-Length: 5000")
    for _ in range(3):
        with raw(slow_toy, data):
            time.sleep(0.05)
    time.sleep(0.3)
    assert slow_toy.get("/readyz").status_code == 200
    assert "Traceback" not in slow_toy.log and " 500 " not in slow_toy.log
    assert idle(slow_toy)


def test_clients_that_leave_do_not_disturb_those_that_stay(slow_toy, tokenizer):
    from tests.engine.toy_model import naive_generate

    tokens = naive_generate(tokenizer.encode("hello"), max_tokens=30, ignore_eos=True)
    answers = []

    def stay():
        body = {**LONG, "max_tokens": 30}
        answers.append(slow_toy.post(COMPLETIONS, body).json()["choices"][0]["text"])

    staying = [threading.Thread(target=stay) for _ in range(3)]
    for thread in staying:
        thread.start()
    for _ in range(8):
        with raw(slow_toy, http_request(COMPLETIONS, json.dumps({**LONG, "stream": True}).encode())):
            time.sleep(0.05)
    for thread in staying:
        thread.join(30)
    assert answers == [tokenizer.decode(tokens)] * 3
    wait_for(lambda: idle(slow_toy), 3)


def test_the_official_clients_close_cancels(slow_toy):
    with openai.OpenAI(base_url=slow_toy.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for count, _ in enumerate(stream):
            if count == 3:
                break
        stream.close()
        wait_for(lambda: idle(slow_toy), 3)
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model="toy", prompt="hello", max_tokens=300, timeout=0.5,
                                      extra_body={"ignore_eos": True})  # fmt: skip
        wait_for(lambda: idle(slow_toy), 3)


def test_tokens_arrive_one_by_one(slow_toy):
    moments = []
    with httpx.stream("POST", slow_toy.url + COMPLETIONS, json={**LONG, "max_tokens": 10, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                moments.append(time.monotonic())
    assert len(moments) >= 10
    assert moments[-1] - moments[0] > 0.03 * 6  # not all at the end


def test_a_slow_reader_gets_everything(slow_toy):
    """A client that does not read for a while blocks nobody, and finds the whole stream afterwards."""
    body = json.dumps({**LONG, "max_tokens": 60, "logprobs": 20, "stream": True}).encode()
    with raw(slow_toy, http_request(COMPLETIONS, body, "Connection: close")) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        quick = slow_toy.post(COMPLETIONS, {**LONG, "max_tokens": 3})
        assert quick.status_code == 200
        wait_for(lambda: idle(slow_toy), 15)
        data = read_all(connection)
    assert data.count(b'"finish_reason":"length"') == 1 and b"data: [DONE]\n\n" in data


def test_a_silent_stream_is_kept_open_by_comments():
    with toy_server(toy={"delay": 0.5}, keep_alive_interval=0.15) as server:
        response = server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "temperature": 0, "stream": True})
        assert response.text.count(": keep-alive\n\n") >= 3
        assert events_of(response.text)[-1] == "[DONE]"


def test_no_comment_stands_between_tokens_that_come_at_once(toy):
    body = {"prompt": "hello", "max_tokens": 40, "n": 4, "temperature": 1, "ignore_eos": True, "stream": True}
    for seed in range(5):
        assert "keep-alive" not in toy.post(COMPLETIONS, {**body, "seed": seed}).text


def test_a_client_that_never_reads_loses_its_connection_and_a_slow_one_does_not():
    """Neither holds a slot; the first would hold its half of an answer for as long as it liked."""
    toy = {"delay": 0.0, "max_len": 4000}
    body = json.dumps({**LONG, "max_tokens": 3900, "n": 4, "logprobs": 5, "stream": True}).encode()
    request = http_request(COMPLETIONS, body, "Connection: close")
    with (
        toy_server(toy=toy, connection_timeout=1) as server,
        raw(server, request, receive_buffer=4096),
        raw(server, request) as slow,
    ):
        got = b""
        for _ in range(20):  # longer than the server waits for a client that reads nothing
            got += slow.recv(65536)
            time.sleep(0.1)
        got += read_all(slow)
        assert got.count(b'"finish_reason":"length"') == 4 and b"data: [DONE]" in got
        wait_for(lambda: f"{COMPLETIONS} 499" in server.log, 20, "the end of the client that never reads")
        assert server.metric("nxd_slots_free") == 4


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    """A server whose steps fail as the file says: once, value, hang."""
    file = tmp_path_factory.mktemp("fail") / "fail"
    with toy_server(
        toy={"delay": 0.02, "max_len": 400}, arguments=("--fail-file", str(file)), max_restarts=20, log_format="json"
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
    server.wait_ready(10)
    assert server.metric("nxd_engine_restarts_total") >= 1
    assert server.post(COMPLETIONS, {**LONG, "max_tokens": 3}).status_code == 200


def test_the_official_client_raises_on_a_cut_stream(failing):
    server, file = failing
    server.wait_ready(10)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model="toy", prompt="hello", max_tokens=300, stream=True,
                                           extra_body={"ignore_eos": True})  # fmt: skip
        with pytest.raises(openai.APIError):
            for count, _ in enumerate(stream):
                if count == 2:
                    file.write_text("once")
    server.wait_ready(10)


def test_a_failure_before_the_first_token_is_a_status_of_its_own(failing):
    server, file = failing
    server.wait_ready(10)
    for stream in (True, False):
        file.write_text("once")
        response = server.post(COMPLETIONS, {**LONG, "stream": stream})
        is_error(response, 503)
        assert int(response.headers["retry-after"]) >= 1
        server.wait_ready(10)


def test_a_step_that_refuses_one_request_leaves_the_ranks_alone(failing):
    server, file = failing
    server.wait_ready(10)
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
