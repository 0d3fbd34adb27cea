"""From the first answer to the exit status: starting, draining, failing, and ports in use."""

from __future__ import annotations

import concurrent.futures
import errno
import json
import pathlib
import re
import signal
import socket
import time

import httpx
import pytest

from nxd_server.app.run import FLUSH_SECONDS, serve
from nxd_server.settings import ServerSettings
from tests.support.engine.toy_model import naive_generate
from tests.support.http.http_servers import (
    events_of,
    http_request,
    is_error,
    logged,
    raw,
    read_all,
    toy_server,
    wait_for,
)

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "hello", "max_tokens": 36, "temperature": 0, "ignore_eos": True}
SLOW = {"delay": 0.1, "max_len": 4000}
ENDLESS = {**LONG, "max_tokens": 3900}
"""It does not end by itself while a test looks at it: a step of SLOW takes 0.1 s."""


def test_it_lives_at_once_and_is_ready_when_warm(tmp_path):
    with toy_server(wait=False, arguments=("--start-file", str(tmp_path / "go"))) as server:
        assert server.get("/livez").status_code == 200
        for path in ("/readyz", "/ping", "/health"):
            response = server.get(path)
            error = is_error(response, 503, code="starting")
            assert response.json()["status"] == "starting" and "loading" in error["message"]
            assert response.headers["retry-after"]
        for path in (COMPLETIONS, "/v1/embeddings", "/invocations"):
            is_error(server.post(path, {"prompt": "a"}), 503, code="starting")
        for path in ("/v1/models", "/v1/buckets"):
            is_error(server.get(path), 503)
        is_error(server.post("/tokenize", {"prompt": "a"}), 503)
        assert server.metric("nxd_ready") == 0
        (tmp_path / "go").touch()
        server.wait_ready()
        assert server.metric("nxd_ready") == 1
        assert server.get("/health").json()["status"] == "ready"
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
        wait_for(lambda: re.search(r"warmed up \d of 5 graphs", server.log))
        assert all(bucket["executions"] <= 2 for bucket in server.get("/v1/buckets").json()["data"])
        assert server.stop() == 0


@pytest.mark.smoke
def test_a_signal_lets_what_runs_finish_and_exits_0(tokenizer, tmp_path):
    text = tokenizer.decode(naive_generate(tokenizer.encode("hello"), max_tokens=36, ignore_eos=True))
    hold = tmp_path / "hold"
    arguments = ("--fail-file", str(hold))
    with concurrent.futures.ThreadPoolExecutor(8) as pool, toy_server(arguments=arguments) as server:
        hold.write_text("hold")  # nothing finishes before it has been looked at, however slow this machine is
        whole = [pool.submit(server.post, COMPLETIONS, LONG) for _ in range(3)]
        streams = [pool.submit(server.post, COMPLETIONS, {**LONG, "stream": True}) for _ in range(3)]
        # More than there are slots for, so that some have not begun when the signal comes.
        wait_for(lambda: server.inside == 6)
        server.process.send_signal(signal.SIGINT)  # SIGTERM: the other tests
        wait_for(lambda: server.get("/readyz").status_code == 503)
        assert server.get("/livez").status_code == 200
        is_error(server.get("/readyz"), 503, code="draining")
        is_error(server.post(COMPLETIONS, LONG), 503, code="draining")
        assert not any(future.done() for future in (*whole, *streams))
        hold.unlink()
        assert server.wait() == 0
        assert [future.result().json()["choices"][0]["text"] for future in whole] == [text] * 3
        for future in streams:
            events = events_of(future.result().text)
            assert events[-1] == "[DONE]"
            assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
        assert "Traceback" not in server.log


def test_what_does_not_finish_in_time_is_cut_and_says_so():
    pool = concurrent.futures.ThreadPoolExecutor(2)
    with toy_server(toy=SLOW, drain_timeout=0.7) as server, pool:
        whole = pool.submit(server.post, COMPLETIONS, ENDLESS)
        stream = pool.submit(server.post, COMPLETIONS, {**ENDLESS, "stream": True})
        wait_for(lambda: server.metric("nxd_num_requests_running") == 2)
        assert server.stop() == 0
        is_error(whole.result(), 503)
        text = stream.result().text
        assert "[DONE]" not in text and '"finish_reason":"' not in text
        assert json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))["error"]["message"]


def test_a_slow_reader_gets_its_whole_answer_while_the_server_drains():
    """The engine is done with it long before; what waits in the server's memory must not be lost."""
    body = json.dumps({**LONG, "max_tokens": 2000, "n": 4, "logprobs": 5, "stream": True}).encode()
    toy = {"delay": 0.0, "max_len": 2100}
    request = http_request(COMPLETIONS, body, "Connection: close")
    with (
        toy_server(toy=toy, drain_timeout=600, connection_timeout=600) as server,
        raw(server, request, timeout=600, receive_buffer=4096) as slow,
    ):
        wait_for(lambda: server.metric("nxd_generation_tokens_total") == 4 * 2000)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(FLUSH_SECONDS + 1)
        assert server.process.poll() is None
        answer = read_all(slow)
        assert answer.count(b'"finish_reason":"length"') == 4 and b"data: [DONE]" in answer
        assert server.wait() == 0


OTHER = "another change of weights, adapters or ranks is on its way"


def test_a_signal_ends_a_swap_that_waits_and_no_request(tmp_path):
    (tmp_path / "new").write_text("1")
    hold = tmp_path / "hold"
    settings = {"admin_key": "root", "weights_root": str(tmp_path), "weights_drain_timeout": 600}
    with (
        concurrent.futures.ThreadPoolExecutor(2) as pool,
        toy_server(arguments=("--fail-file", str(hold)), **settings) as server,
    ):
        hold.write_text("hold")
        running = pool.submit(server.post, COMPLETIONS, LONG)
        server.wait_metric("nxd_num_requests_running", 1.0)
        admin = {"authorization": "Bearer root"}

        def swap(**more):
            return server.post("/v1/weights", {"path": "new", **more}, headers=admin)

        def swap_in_turn():
            while OTHER in (answer := swap()).text:
                pass
            return answer

        swapping = pool.submit(swap_in_turn)
        wait_for(lambda: OTHER in swap(timeout=0.01).text)
        server.process.send_signal(signal.SIGTERM)
        error = is_error(swapping.result(60), 503, code="draining")
        assert "the weights are unchanged" in error["message"] and not running.done()
        hold.unlink()
        assert server.wait() == 0
        assert running.result().json()["weight_version"] == 0


def test_an_adapter_whose_files_hang_does_not_hold_up_the_end(tmp_path):
    settings = {"admin_key": "root", "weights_root": str(tmp_path), "drain_timeout": 1}
    ask = {"json": {"name": "x", "path": str(tmp_path)}, "headers": {"authorization": "Bearer root"}}
    with concurrent.futures.ThreadPoolExecutor(1) as pool, toy_server(toy={"lora_slots": 1}, **settings) as server:
        hanging = pool.submit(server.post, "/v1/adapters", **ask)
        wait_for((tmp_path / "entered").exists)
        assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200
        assert server.stop() == 0
        assert isinstance(hanging.exception(60), httpx.HTTPError)


def test_a_second_signal_ends_at_once_with_status_1():
    body = json.dumps({**ENDLESS, "stream": True}).encode()
    with toy_server(toy=SLOW, drain_timeout=600) as server, raw(server, http_request(COMPLETIONS, body)):
        wait_for(lambda: server.metric("nxd_num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/readyz").status_code == 503)  # else both signals may be one
        assert server.stop() == 1


def test_neither_a_start_nor_idle_connections_hold_up_the_end():
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{"
    patient = {"drain_timeout": 600, "connection_timeout": 600, "request_timeout": 600}
    with (
        toy_server(wait=False, arguments=("--start-file", "/nonexistent/file"), **patient) as server,
        raw(server),
        raw(server, half),
    ):
        server.get("/livez")
        assert server.stop() == 0
        assert "Traceback" not in server.log


def test_a_port_in_use_is_told_and_status_1(artifact, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve(artifact, ServerSettings.resolve(port=port)) == 1
    told = logged(capfd, "stop what uses the port")
    assert f"127.0.0.1:{port}" in told and "Traceback" not in told


@pytest.fixture
def artifact(tmp_path):
    """A directory that looks like an artifact from afar."""
    (tmp_path / "manifest.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "no.such.host.invalid"}, "no.such.host.invalid"),
        ({"host": "203.0.113.7"}, "an address of this machine with --host"),
        ({"api_keys_file": "/nonexistent/keys"}, "api_keys_file '/nonexistent/keys' cannot be read: No such file"),
        ({}, "giving up"),  # the manifest is empty
    ],
)
def test_what_cannot_be_served_is_told_and_status_1(artifact, capfd, settings, words):
    assert serve(artifact, ServerSettings.resolve(port=0, **settings)) == 1
    assert "Traceback" not in logged(capfd, words)


def test_what_is_no_artifact_is_told_and_status_1(tmp_path, capfd, monkeypatch):
    assert serve(tmp_path, ServerSettings.resolve(port=0)) == 1
    assert logged(capfd, "manifest.json")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "is_file", refuse)  # root may read everything
    assert serve(tmp_path, ServerSettings.resolve(port=0)) == 1
    assert "Traceback" not in logged(capfd, f"Permission denied: '{tmp_path}/manifest.json'")


@pytest.mark.parametrize(
    ("what", "times", "words"),
    [
        ("always", 1, "could not be started again: rank 0 ended with signal 9"),
        ("once", 2, "started again as often as max_restarts allows (1 in 600 s): see in the log"),
    ],
)
def test_ranks_that_fail_more_often_than_is_allowed_end_the_server_with_the_way_out(tmp_path, what, times, words):
    file = tmp_path / "fail"
    with toy_server(arguments=("--fail-file", str(file)), max_restarts=1) as server:
        for _ in range(times):
            server.wait_ready()
            file.write_text(what)
            is_error(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}), 503)
        assert server.wait() == 1
        (last,) = [line for line in server.lines if "giving up" in line]
        assert words in last and "Traceback" not in server.log


def test_a_recovery_that_takes_too_long_ends_the_server_with_status_1(tmp_path):
    file = tmp_path / "fail"
    with toy_server(arguments=("--fail-file", str(file)), recovery_timeout=60.0) as server:
        file.write_text("once")
        is_error(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}), 503)
        server.wait_ready()
        file.write_text("once, then hang")  # the warm-up after the restart does not return
        is_error(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}), 503)
        wait_for(lambda: server.get("/health").json().get("recovery", {}).get("stage") == "a first step runs")
        error = is_error(server.get("/readyz"), 503, code="recovering")
        assert "starting the ranks again: a first step runs, " in error["message"]
        assert "at most 60 s" in error["message"]
        found = server.get("/health").json()["recovery"]
        assert found["stage"] == "a first step runs" and found["limit"] == 60.0 and found["expected"] > 0
        assert server.wait(300) == 1
        assert "not ready again within 60 s" in server.log and "Traceback" not in server.log
