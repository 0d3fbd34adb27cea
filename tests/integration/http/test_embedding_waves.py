"""Long lists of texts: in waves, all of them within one deadline, each text with its own vector."""

from __future__ import annotations

import concurrent.futures
import signal
from typing import Any

import pytest
import torch

from tests.support.engine.toy_oneshot import expected
from tests.support.http.http_servers import is_error, toy_server, wait_for

EMBEDDINGS = "/v1/embeddings"
STEP, WAVES = 0.1, 40
"""Seconds of a step, and how many steps of four texts the long list needs."""


def encoder(**settings: Any):
    return toy_server(toy={"delay": STEP}, arguments=("--one-shot",), max_queued_requests=8, **settings)


@pytest.fixture(scope="module")
def patient():
    with encoder(access_log=False) as server:
        yield server


def texts(count):
    """Different ones, as token ids."""
    return [[2 + number // 90, 2 + number % 90, 7] for number in range(count)]


def executed(server):
    return sum(bucket["executions"] for bucket in server.get("/v1/buckets").json()["data"])


def test_the_deadline_is_of_the_request_and_not_of_each_wave():
    with encoder(request_timeout=2.0) as server:
        before = executed(server)
        is_error(server.post(EMBEDDINGS, {"input": texts(4 * WAVES)}), 504)
        assert executed(server) - before < WAVES, "the rest was worked off all the same"
        short = texts(4)
        answers = []
        wait_for(lambda: answers.append(server.post(EMBEDDINGS, {"input": short})) or answers[-1].status_code == 200)
        data = answers[-1].json()["data"]  # a busy machine may take longer than its first deadline
        assert [one["embedding"] for one in data] == [expected(torch.tensor(ids)).tolist() for ids in short]


def test_a_list_that_is_longer_than_the_queue_is_answered_in_order(patient):
    data = patient.post(EMBEDDINGS, {"input": texts(4 * WAVES)}).json()["data"]
    assert [one["embedding"] for one in data] == [expected(torch.tensor(ids)).tolist() for ids in texts(4 * WAVES)]


def test_a_long_list_that_runs_is_finished_after_a_signal():
    """The engine is idle between two of its waves, and the server not yet done."""
    with encoder() as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, EMBEDDINGS, {"input": texts(2 * WAVES)})
        wait_for(lambda: executed(server) > 4)
        server.process.send_signal(signal.SIGTERM)
        assert len(answer.result().json()["data"]) == 2 * WAVES
        assert server.wait() == 0


def test_long_texts_are_tokenised_aside_and_cut_to_what_fits(patient, tokenizer):
    """It was in a thread of the server, for five seconds a megabyte, in which nothing else ran."""
    hello = "hello, you there. "
    several = [hello * 5000, hello, hello * 400]
    error = is_error(patient.post(EMBEDDINGS, {"input": several[:1]}), 400, "input", "context_length_exceeded")
    assert f"has {5000 * len(tokenizer.encode(hello))} tokens" in error["message"]
    data = patient.post(EMBEDDINGS, {"input": several, "truncate_prompt_tokens": 8}).json()["data"]
    assert [one["embedding"] for one in data] == [expected(torch.tensor(tokenizer.encode(hello)[:8])).tolist()] * 3
