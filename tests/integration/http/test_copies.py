"""Copies of a model: who answers, what a lost copy costs, and changes that are made in one after the other."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.adapter_files import merge, write_adapter
from tests.support.engine.toy_model import naive_generate
from tests.support.http.http_artifacts import ONE_LAYER, PROMPTS, greedy_texts, real_server, trace_sampled
from tests.support.http.http_servers import events_of, is_error, toy_server, wait_for
from tests.support.http.load import COMPLETIONS, TOKENS, Load, body_of, rank_pids
from tests.support.tiny_models import write_tiny

ADMIN = {"headers": {"authorization": "Bearer admin"}}
MODEL = "tiny-llama"


def copies(server, model=MODEL):
    return server.get("/health").json()["models"][model]["copies"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("copies")


@pytest.fixture(scope="module")
def model_dir():
    return trace_sampled().parent / "model"


@pytest.fixture(scope="module")
def server(root):
    options = ("--replicas", "2", "--no-generation-defaults", "--admin-key", "admin", "--weights-root", str(root))
    with real_server(trace_sampled(), *options, "--max-restarts", "9") as server:
        wait_for(lambda: all(copy["status"] == "ready" for copy in copies(server)))
        yield server


@pytest.fixture(scope="module")
def texts(model_dir):
    return greedy_texts(model_dir, PROMPTS, TOKENS)


@pytest.mark.smoke
@pytest.mark.parametrize("stuck", [True, False], ids=["stopped", "killed"])
def test_a_lost_copy_is_unseen_by_requests_that_have_no_token_yet(server, texts, stuck):
    pids, restarts = rank_pids(server), server.metric("nxd_engine_restarts_total")
    assert len(set(pids)) == 2
    if min(len(os.sched_getaffinity(pid)) for pid in (os.getpid(), *pids)) == 1 < os.cpu_count():
        assert os.sched_getaffinity(pids[0]).isdisjoint(os.sched_getaffinity(pids[1]))
    os.kill(pids[0], signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        bodies = [body_of(prompt, stream=number % 2 == 0) for number, prompt in enumerate(PROMPTS[:4])]
        answers = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        wait_for(lambda: sum(answer.done() for answer in answers) == 2, message="the other copy answers")
        wait_for(lambda: copies(server)[0]["running"] + copies(server)[0]["waiting"] == 2, 60)
        if not stuck:
            os.kill(pids[0], signal.SIGKILL)
        for answer, body in zip(answers, bodies, strict=True):
            response = answer.result(120)
            assert response.status_code == 200, response.text
            if body["stream"]:
                *events, end = events_of(response.text)
                assert end == "[DONE]" and "".join(e["choices"][0]["text"] for e in events) == texts[body["prompt"]]
            else:
                assert response.json()["choices"][0]["text"] == texts[body["prompt"]]
    assert server.get("/readyz").status_code == 200
    if stuck:  # it is late, and not lost
        os.kill(pids[0], signal.SIGCONT)
    wait_for(lambda: all(copy["status"] == "ready" for copy in copies(server)))
    assert server.metric("nxd_engine_restarts_total") == restarts + (not stuck)
    assert rank_pids(server)[1] == pids[1]


def test_new_weights_and_new_ranks_go_from_copy_to_copy_while_all_are_answered(server, root, texts):
    write_tiny("llama", root / "other", seed=1, **ONE_LAYER)
    with Load(server, texts, greedy_texts(root / "other", PROMPTS, TOKENS)) as load:
        pids = rank_pids(server)
        assert server.post("/v1/restart", {}, **ADMIN).json()["copies"] == 2
        assert not set(pids) & set(rank_pids(server))
        answer = server.post("/v1/weights", {"path": "other", "timeout": 600}, **ADMIN)
        assert answer.json()["version"] == 1, answer.text
        assert [copy["weight_version"] for copy in copies(server)] == [1, 1]
        seen = len(load.answers)
        wait_for(lambda: len(load.answers) > seen + 10)
    assert not (load.refused or load.cut or load.wrong), (load.refused, load.cut, load.wrong[:3])
    assert (
        {copy["weight_version"] for copy in copies(server)}
        == {1}
        == {server.get("/v1/models").json()["data"][0]["weight_version"]}
    )
    is_error(server.post("/v1/restart", {}), 401)
    is_error(server.post("/v1/weights", {"path": "nothing"}, **ADMIN), 400)


def test_an_adapter_is_in_every_copy_or_in_none(server, root, model_dir):
    write_adapter(root / "own", model_dir, rank=4)
    base = root / "other" if copies(server)[0]["weight_version"] else model_dir  # by the test before
    (want,) = greedy_texts(merge(base, root / "own", root / "merged"), PROMPTS[:1], TOKENS).values()
    assert server.post("/v1/adapters", {"name": "own", "path": "own"}, **ADMIN).status_code == 200
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post(COMPLETIONS, body_of(PROMPTS[0], model="own")), range(4)))
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {want}
    assert server._client.delete(f"{server.url}/v1/adapters/own", **ADMIN).json()["deleted"] is True
    for _ in range(2):
        is_error(server.post(COMPLETIONS, body_of(PROMPTS[0], model="own")), 404, code="model_not_found")


def test_while_an_adapter_is_on_its_way_new_weights_are_refused_by_all_copies(server, root, model_dir, texts):
    write_adapter(root / "late", model_dir, rank=4)
    pids, versions = rank_pids(server), [copy["weight_version"] for copy in copies(server)]
    os.kill(pids[1], signal.SIGSTOP)
    with ThreadPoolExecutor(5) as pool:
        try:
            answers = [pool.submit(server.post, COMPLETIONS, body_of(prompt)) for prompt in PROMPTS[:4]]
            wait_for(lambda: copies(server)[1]["running"] > 0, 60)
            loading = pool.submit(server.post, "/v1/adapters", {"name": "late", "path": "late"}, **ADMIN)
            # a folder without weights: until the adapter's turn has begun, the first copy finds that out
            swap = {"path": "late", "timeout": 60}
            wait_for(lambda: server.post("/v1/weights", swap, **ADMIN).status_code == 409, 30)
            bad = server.post("/v1/adapters", {"name": "no name!", "path": "late"}, **ADMIN)
            is_error(bad, 400, "name")  # at once
            for _ in range(20):  # the first copy has the adapter soon, the other one waits
                refused = is_error(server.post("/v1/weights", swap, **ADMIN), 409, code="weights_busy")
                assert "copies" not in refused["message"]
                time.sleep(0.1)
        finally:
            os.kill(pids[1], signal.SIGCONT)
        assert loading.result(120).status_code == 200
        assert all(answer.result(120).status_code == 200 for answer in answers)
    assert [copy["weight_version"] for copy in copies(server)] == versions
    server._client.delete(f"{server.url}/v1/adapters/late", **ADMIN)


def test_streams_that_have_begun_end_with_an_error_and_those_that_wait_move(tmp_path, tokenizer):
    """Over two toys of four slots: eight run, four wait. One toy dies in its next step."""
    fails = tmp_path / "fails"
    slow = {"toy": {"delay": 0.1}, "arguments": ("--fail-file", str(fails)), "max_queued_requests": 400}
    with toy_server(**slow, replicas=2) as server, ThreadPoolExecutor(12) as pool:
        wait_for(lambda: all(copy["status"] == "ready" for copy in copies(server, "toy")))
        fails.write_text("hold")  # a step that has begun takes nobody in, so only one may run yet
        prompts = [chr(97 + number) for number in range(12)]
        bodies = [{**body_of(prompt), "max_tokens": 60, "stream": True} for prompt in prompts]
        answers = [pool.submit(server.post, COMPLETIONS, body) for body in bodies]
        wait_for(lambda: server.inside == 12, message="all are in")
        fails.unlink()
        wait_for(lambda: server.metric("nxd_generation_tokens_total") > 24, message="each slot has a token")
        fails.write_text("hold")
        assert [copy["running"] for copy in copies(server, "toy")] == [4, 4] and server.inside == 12
        fails.write_text("once")
        responses = [answer.result(120) for answer in answers]
        cut = [response for response in responses if "[DONE]" not in response.text]
        assert len(cut) == 4, [response.text[-200:] for response in responses]
        for prompt, response in zip(prompts, responses, strict=True):
            *events, last = events_of(response.text)
            if response in cut:
                assert last["error"]["code"] == "engine_failed", last
                continue
            tokens = naive_generate(tokenizer.encode(prompt), max_tokens=60, ignore_eos=True)
            assert "".join(event["choices"][0]["text"] for event in events) == tokenizer.decode(tokens)


def test_a_prompt_goes_to_the_copy_that_holds_its_beginning():
    with toy_server(replicas=2) as server:
        wait_for(lambda: all(copy["status"] == "ready" for copy in copies(server, "toy")))
        found = []
        for prompt in ("a" * 24, "b" * 24, "a" * 26, "a" * 28, "b" * 26):
            usage = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}).json()["usage"]
            found.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert found[:2] == [0, 0] and min(found[2:]) >= 24, found
        assert [copy["running"] for copy in copies(server, "toy")] == [0, 0]
        assert min(server.metric("nxd_rank_steps_total", rank=rank, copy=rank) for rank in ("0", "1")) > 0
        tokens = [server.metric("nxd_prompt_tokens_total", copy=copy) for copy in ("0", "1")]
        assert min(tokens) >= 24 and sum(tokens) == server.metric("nxd_prompt_tokens_total") == 128


def test_a_copy_that_cannot_be_kept_alive_leaves_the_others(tmp_path, tokenizer):
    fails = tmp_path / "fails"
    with toy_server(arguments=("--fail-file", str(fails)), replicas=2, max_restarts=0) as server:
        wait_for(lambda: all(copy["status"] == "ready" for copy in copies(server, "toy")))
        fails.write_text("once")
        for _ in range(3):
            response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
            assert response.status_code == 200, response.text
        wait_for(lambda: [copy["status"] for copy in copies(server, "toy")].count("failed") == 1)
        assert "1 of 2 copies go on" in server.log and server.get("/readyz").status_code == 200
        fails.write_text("once")
        is_error(server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2}), 503, code="engine_failed")
        assert server.wait() == 1
