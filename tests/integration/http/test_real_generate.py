"""A real traced model behind the real server: two rank processes, real answers, and ranks that die."""

from __future__ import annotations

import concurrent.futures
import os
import signal
from pathlib import Path

import pytest

from tests.support.http.http_artifacts import PROMPTS, real_server
from tests.support.http.http_servers import events_of, wait_for
from tests.support.http.load import COMPLETIONS, Load, body_of, rank_pids
from tests.support.processes import descendants, gone, name_of, parent_of


def holds_torch(pid):
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.smoke
def test_greedy_answers_are_those_of_the_plain_model(real_llama, real_client, llama_texts):
    for prompt in PROMPTS[:6]:
        assert real_llama.post(COMPLETIONS, body_of(prompt)).json()["choices"][0]["text"] == llama_texts[prompt]
    answer = real_client.chat.completions.create(
        model="tiny-llama", messages=[{"role": "user", "content": "hello"}], max_tokens=4, temperature=0,
        logprobs=True, top_logprobs=20,
    )  # fmt: skip
    assert answer.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0


def test_the_ranks_say_who_they_are_and_hold_torch_alone(real_llama):
    (card,) = real_llama.get("/v1/models").json()["data"]
    assert (card["pp_degree"], card["tp_degree"]) == (1, 2)
    pids = rank_pids(real_llama)
    assert len(pids) == 2 and not holds_torch(real_llama.process.pid)
    for rank, pid in enumerate(pids):
        assert name_of(pid) == f"nxd rank {rank}" and holds_torch(pid)
        assert pid in descendants(real_llama.process.pid)


@pytest.mark.smoke
def test_a_rank_killed_under_load(llama, llama_texts):
    """Nobody gets a wrong answer, the server is ready again, and its new ranks end with it."""
    with real_server(llama, "--recovery-timeout", "300") as server:  # however busy the machine is
        pids = rank_pids(server)
        with Load(server, llama_texts) as load:
            wait_for(lambda: len(load.answers) > 20)
            os.kill(pids[1], signal.SIGKILL)  # the server ends rank 0 for it
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
        assert "the ranks failed: rank 1 of 2 was ended by SIGKILL" in server.log
        assert "starting the ranks again (1 of 3 times in 600 s)" in server.log
        assert "rank 0 of 2" not in server.log and "Traceback" not in server.log
        assert sum(word in line for line in server.lines for word in ("ERROR", "CRITICAL")) == 1
        pids = rank_pids(server)
        server.kill()
        for pid in pids:
            wait_for(lambda pid=pid: gone(pid), message=f"rank process {pid} outlived the server")


def test_a_stopped_rank_is_noticed_while_nobody_asks(llama):
    with real_server(llama, "--call-timeout", "4") as server:
        pids = rank_pids(server)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(lambda: "the ranks failed" in server.log)
        wait_for(lambda: "ready again" in server.log)
        assert gone(pids[1])


def test_a_signal_while_the_ranks_start_leaves_nothing_behind(llama):
    with real_server(llama, wait=False) as server:
        wait_for(lambda: len(server.get("/health").json()["ranks"]) == 2)
        pids = [pid for pid in rank_pids(server) if pid]
        assert server.stop() == 0, server.log
        for pid in pids:
            wait_for(lambda pid=pid: gone(pid))
        assert "Traceback" not in server.log


def test_a_signal_to_all_processes_of_the_server_finishes_what_runs(llama, llama_texts):
    """As systemd sends it, or a machine that is shut down; ranks that it ended took their requests with them."""
    with real_server(llama, "--drain-timeout", "300") as server:
        rank = rank_pids(server)[1]
        all_of_them = [server.process.pid, parent_of(rank) or 0, *descendants(server.process.pid)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            os.kill(rank, signal.SIGSTOP)  # so that all are in, and none is over, when the signal comes
            asked = [pool.submit(server.post, COMPLETIONS, body_of(p, max_tokens=20)) for p in PROMPTS[:7]]
            stream = pool.submit(server.post, COMPLETIONS, body_of(PROMPTS[7], stream=True))
            wait_for(lambda: server.inside == 8)
            for pid in all_of_them:
                os.kill(pid, signal.SIGTERM)
            wait_for(lambda: "no new requests" in server.log)
            os.kill(rank, signal.SIGCONT)
            assert server.wait() == 0
            for prompt, future in zip(PROMPTS, asked, strict=False):
                assert future.result().json()["choices"][0]["text"].startswith(llama_texts[prompt].rstrip("\ufffd"))
                assert future.result().json()["usage"]["completion_tokens"] == 20
            *events, done = events_of(stream.result().text)
            assert done == "[DONE]"
            assert "".join(event["choices"][0]["text"] for event in events) == llama_texts[PROMPTS[7]]
        assert all(gone(pid, 60) for pid in all_of_them[1:])
        assert "Traceback" not in server.log
