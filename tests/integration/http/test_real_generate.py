"""A real traced model behind the real server: two rank processes, real answers, and ranks that die or stop."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.http.http_artifacts import PROMPTS, greedy_texts, real_server, trace_tiny
from tests.support.http.http_servers import ServerProcess, events_of, is_error, logged, wait_for
from tests.support.http.load import COMPLETIONS, TOKENS, Load, body_of, rank_pids
from tests.support.processes import command_of, descendants, gone, parent_of

PATIENT = ("--recovery-timeout", "120")
"""Ranks come back however busy the machine is; what a server does when they do not is tested with a toy."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama at degree 2: batches of 1 and 8, prompts of 16 and 32, 128 positions."""
    directory = tmp_path_factory.mktemp("llama")
    shapes = {"batch_sizes": [1, 8], "prompt_buckets": [16, 32], "max_len": 128}
    return directory / "model", trace_tiny("llama", "generate", directory, **shapes)


@pytest.fixture(scope="module")
def texts(llama):
    return greedy_texts(llama[0], PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def server(llama):
    with real_server(llama[1]) as server:
        yield server


def holds_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_greedy_answers_are_those_of_the_plain_model(server, texts):
    for prompt in PROMPTS[:6]:
        assert server.post(COMPLETIONS, body_of(prompt)).json()["choices"][0]["text"] == texts[prompt]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny-llama", messages=[{"role": "user", "content": "hello"}], max_tokens=4, temperature=0,
            logprobs=True, top_logprobs=20,
        )  # fmt: skip
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0


def test_the_ranks_are_descendants_that_say_who_they_are(server):
    pids = rank_pids(server)
    assert len(pids) == 2
    for rank, pid in enumerate(pids):
        assert f"rank {rank}" in command_of(pid)
        assert pid in descendants(server.process.pid)


def test_torch_is_in_the_ranks_alone(server, texts):
    assert server.post(COMPLETIONS, body_of(PROMPTS[0])).json()["choices"][0]["text"] == texts[PROMPTS[0]]
    assert not holds_torch(server.process.pid)
    assert all(holds_torch(pid) for pid in rank_pids(server))


def test_a_thousand_requests_by_32_threads_each_get_their_own(server, texts):
    numbers = itertools.count()
    wrong = []

    def work():
        with httpx.Client(base_url=server.url, timeout=600) as client:
            while (number := next(numbers)) < 1000:
                prompt = PROMPTS[number * 7 % len(PROMPTS)]
                stream = number % 3 == 0
                response = client.post(COMPLETIONS, json=body_of(prompt, stream=stream))
                if stream:
                    events = events_of(response.text)
                    text = "".join(event["choices"][0]["text"] for event in events[:-1])
                else:
                    text = response.json()["choices"][0]["text"]
                if text != texts[prompt]:
                    wrong.append((number, prompt, text, texts[prompt]))

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        for future in [pool.submit(work) for _ in range(32)]:
            future.result()
    assert not wrong, wrong[:3]
    assert server.metric("nxd_num_requests_running") == 0 and server.metric("nxd_slots_free") == 8


def test_batch_mates_never_change_a_seeded_answer(server):
    ask = body_of("the with", max_tokens=12, temperature=1.2, seed=11, top_p=0.95)
    alone = server.post(COMPLETIONS, ask).json()["choices"][0]["text"]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        same = [pool.submit(server.post, COMPLETIONS, ask) for _ in range(4)]
        other = [pool.submit(server.post, COMPLETIONS, {**ask, "seed": i, "prompt": PROMPTS[i]}) for i in range(8)]
        assert {future.result().json()["choices"][0]["text"] for future in same} == {alone}
        assert len({future.result().json()["choices"][0]["text"] for future in other}) == 8


@pytest.mark.parametrize("value", [5e-324, 1e-45, 1e-38])
def test_a_subnormal_temperature_harms_nobody(server, texts, value):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        odd = [pool.submit(server.post, COMPLETIONS, body_of(PROMPTS[0], temperature=value, seed=1)) for _ in range(2)]
        good = [pool.submit(server.post, COMPLETIONS, body_of(prompt)) for prompt in PROMPTS[:2]]
    assert [future.result().json()["choices"][0]["text"] for future in good] == [texts[p] for p in PROMPTS[:2]]
    assert odd[0].result().json()["choices"][0]["text"] == texts[PROMPTS[0]]


def test_long_prompts_go_in_pieces_up_to_the_maximum(server):
    for length in (16, 17, 32, 33, 100, 127):
        answer = server.post(COMPLETIONS, body_of([5] * length, max_tokens=1)).json()
        assert answer["usage"]["prompt_tokens"] == length, answer
    is_error(server.post(COMPLETIONS, body_of([5] * 129)), 400, code="context_length_exceeded")


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)], ids=["killed", "stopped"])
def test_a_rank_lost_under_load(llama, texts, number, rank):
    """Nobody gets a wrong answer, and the server is ready again."""
    with real_server(llama[1], "--call-timeout", "120" if number == signal.SIGKILL else "10", *PATIENT) as server:
        pids = rank_pids(server)
        with Load(server, texts) as load:
            wait_for(lambda: len(load.answers) > 20)
            os.kill(pids[rank], number)
            wait_for(lambda: "the ranks failed" in server.log)
            assert server.get("/livez").status_code == 200
            wait_for(lambda: "ready again" in server.log)
            seen = len(load.answers)
            wait_for(lambda: len(load.answers) > seen + 20)
        assert not load.wrong, load.wrong[:3]
        assert load.refused, "requests in flight and during the recovery are told 503"
        for pid in pids:
            wait_for(lambda pid=pid: gone(pid), message=f"rank process {pid} is left over")
        assert server.metric("nxd_engine_restarts_total") == 1
        assert set(rank_pids(server)).isdisjoint(pids)
        assert server.stop() == 0


def test_the_log_names_the_rank_that_died_and_ranks_die_with_the_server(llama):
    with real_server(llama[1], *PATIENT) as server:
        os.kill(rank_pids(server)[1], signal.SIGKILL)  # the server ends rank 0 for it
        wait_for(lambda: "ready again" in server.log)
        assert "the ranks failed: rank 1 of 2 was ended by SIGKILL" in server.log
        assert "starting the ranks again (1 of 3 times in 600 s)" in server.log
        assert "rank 0 of 2" not in server.log and "Traceback" not in server.log
        assert sum(word in line for line in server.lines for word in ("ERROR", "CRITICAL")) == 1
        pids = rank_pids(server)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(60)
        for pid in pids:
            wait_for(lambda pid=pid: gone(pid), message=f"rank process {pid} outlived the server")


def test_a_stopped_rank_is_noticed_while_nobody_asks(llama):
    with real_server(llama[1], "--call-timeout", "4", *PATIENT) as server:
        pids = rank_pids(server)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(lambda: "the ranks failed" in server.log)
        wait_for(lambda: "ready again" in server.log)
        assert gone(pids[1])


def test_a_signal_while_the_ranks_start_leaves_nothing_behind(llama):
    with real_server(llama[1], wait=False) as server:
        wait_for(lambda: len(server.get("/health").json()["ranks"]) == 2)
        pids = [pid for pid in rank_pids(server) if pid]
        assert server.stop() == 0, server.log
        for pid in pids:
            wait_for(lambda pid=pid: gone(pid))
        assert "Traceback" not in server.log


HANGING = """
import logging, sys, threading
from nxd_server.__main__ import main
from nxd_server.text.tokenizer import Tokenizer
Tokenizer.from_dir = lambda directory: logging.error("reading") or threading.Event().wait()
sys.exit(main())
"""


def test_a_tokenizer_that_cannot_be_read_does_not_hold_up_the_end(llama):
    """As if it lay on a file system that does not answer any more."""
    server = ServerProcess([sys.executable, "-c", HANGING, str(llama[1]), "--port", "0"])
    try:
        wait_for(lambda: "reading" in server.log)
        assert server.stop() == 0
    finally:
        server.kill()


def test_the_end_under_load_finishes_what_runs(llama, texts):
    with real_server(llama[1], "--call-timeout", "120", "--drain-timeout", "80") as server:
        pids = rank_pids(server)
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            os.kill(pids[1], signal.SIGSTOP)  # so that all are in, and none is over, when the signal comes
            asked = [pool.submit(server.post, COMPLETIONS, body_of(p, max_tokens=40)) for p in PROMPTS[:12]]
            wait_for(lambda: server.inside == 12)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "no new requests" in server.log)
            os.kill(pids[1], signal.SIGCONT)
            assert server.wait() == 0
            for prompt, future in zip(PROMPTS, asked, strict=False):
                assert future.result().json()["choices"][0]["text"].startswith(texts[prompt][:1])
                assert future.result().json()["usage"]["completion_tokens"] == 40
        assert all(gone(pid) for pid in pids)
        assert "Traceback" not in server.log


def test_a_signal_to_all_processes_of_the_server_lets_a_stream_finish(llama):
    """As systemd sends it, or a machine that is shut down; ranks that it ended took their requests with them."""
    with real_server(llama[1], "--call-timeout", "120", "--drain-timeout", "80") as server:
        rank = rank_pids(server)[1]
        all_of_them = [server.process.pid, parent_of(rank) or 0, *descendants(server.process.pid)]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            os.kill(rank, signal.SIGSTOP)  # so that the stream is not over when the signal comes
            asked = pool.submit(server.post, COMPLETIONS, body_of(PROMPTS[0], max_tokens=40, stream=True))
            wait_for(lambda: server.inside == 1)
            for pid in all_of_them:
                os.kill(pid, signal.SIGTERM)
            wait_for(lambda: "no new requests" in server.log)
            os.kill(rank, signal.SIGCONT)
            assert events_of(asked.result().text)[-1] == "[DONE]"
            assert server.wait() == 0
        assert all(gone(pid, 60) for pid in all_of_them[1:])


def test_a_damaged_artifact_is_refused_by_name(llama, tmp_path, capfd):
    import shutil

    from nxd_server.__main__ import main

    damaged = tmp_path / "damaged"
    shutil.copytree(llama[1], damaged)
    (file,) = damaged.glob("weights/rank_01.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main([str(damaged), "--port", "0", "--log-format", "json"]) == 1
    told = [json.loads(line)["message"] for line in logged(capfd, "rank_01.safetensors").splitlines()]
    assert not any("Traceback" in line for line in told)
