"""Speculation as a user meets it: traced, served and generated with through the command line, streamed, measured."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from nxd_infer.cli.main import app
from tests.support.e2e.command import nxd_infer
from tests.support.http.http_artifacts import ONE_LAYER, greedy_texts, real_server
from tests.support.http.http_servers import ServerProcess, events_of
from tests.support.tiny_models import write_tiny

COMPLETIONS = "/v1/completions"
PROMPT = "the with for the with for the with for the with"
SAME = {"7": 100}
"""A bias that makes every token the same one: all guesses are right."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_tiny("llama", tmp_path_factory.mktemp("speculation") / "model", **ONE_LAYER)


def trace(model_dir, name, *more):
    sizes = ["--batch-sizes", "1,4", "--prompt-buckets", "8,16", "--max-len", "128"]
    out = model_dir.parent / name
    options = ["--dtype", "float32", "--backend", "eager", *sizes, *more]
    done = CliRunner().invoke(app, ["trace", str(model_dir), "--out", str(out), *options])
    return out, done


@pytest.fixture(scope="module")
def artifact(model_dir):
    out, done = trace(model_dir, "artifact", "--speculate", "4")
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture(scope="module")
def server(artifact):
    command = [sys.executable, "-m", "nxd_infer.cli.main", "serve", str(artifact), "--port", "0", "--speculate", "4",
               "--call-timeout", "120"]  # fmt: skip
    server = ServerProcess(command)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


def ask(server, **more):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    return answer


def test_answers_are_the_models_own_and_the_metrics_count_the_guesses(server, model_dir):
    expected = greedy_texts(model_dir, [PROMPT], 24)[PROMPT]
    before = server.metric("nxd_generation_tokens_total")
    answer = ask(server).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == 24
    # Long enough that some guesses are verified however slow the graph was when the server measured it.
    same = ask(server, logit_bias=SAME, max_tokens=80).json()
    word = server.post("/detokenize", {"tokens": [7] * 80}).json()["prompt"]
    assert same["choices"][0]["text"] == word and same["usage"]["completion_tokens"] == 80
    guessed = server.metric("nxd_spec_decode_num_draft_tokens_total")
    assert 0 < server.metric("nxd_spec_decode_num_accepted_tokens_total") <= guessed
    # One row may decode in a graph of four, where that was measured to be no slower.
    assert sum(server.metric("nxd_bucket_executions_total", graph=f"verify_b{batch}") for batch in (1, 4)) > 0
    assert server.metric("nxd_generation_tokens_total") == before + 104


def test_a_stream_has_every_token_and_the_usage(server):
    asked = {"logit_bias": SAME, "max_tokens": 30, "n": 2, "logprobs": 2}
    whole = ask(server, **asked).json()
    text = ask(server, **asked, stream=True, stream_options={"include_usage": True}).text
    events = [event for event in events_of(text) if isinstance(event, dict)]
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"] and len(tokens) == 30
        assert parts[-1]["finish_reason"] == "length"
    del events[-1]["usage"]["prompt_tokens_details"], whole["usage"]["prompt_tokens_details"]  # the second was cached
    assert events[-1]["usage"] == whole["usage"] and whole["usage"]["completion_tokens"] == 60


def test_a_stop_string_cuts_a_run_of_right_guesses(server):
    word = server.post("/detokenize", {"tokens": [7]}).json()["prompt"]
    found = ask(server, logit_bias=SAME, stop=[word * 6]).json()
    assert found["choices"][0]["text"] == "" and found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 6


def test_generate_says_the_same_with_guesses(artifact):
    command = ["generate", str(artifact), PROMPT, "for", "--max-tokens", "40", "--json"]
    answers = [CliRunner().invoke(app, [*command, *more]) for more in ([], ["--speculate", "3"])]
    assert [done.exit_code for done in answers] == [0, 0]
    assert answers[0].output == answers[1].output
    assert json.loads(answers[0].output.splitlines()[0])["tokens"] > 0


def test_generate_tells_how_many_guesses_were_right(artifact):
    command = ["generate", str(artifact), PROMPT, "--max-tokens", "40"]
    plain, guessing = (CliRunner().invoke(app, [*command, *more]).output for more in ([], ["--speculate", "3"]))
    found = re.search(r"\[speculation: (\d+) of (\d+) guessed tokens were right\]", guessing)
    assert found and int(found[1]) <= int(found[2]), guessing  # how many depends on what the graphs take
    assert "speculation" not in plain


def test_the_traced_graphs_equal_the_plain_model(artifact, model_dir):
    done = nxd_infer("verify", artifact, model_dir)
    assert done.status == 0 and "verify_b4" in done.out and "all 7 buckets" in done.out, done


def test_more_than_was_traced_is_refused_with_the_fix(artifact, model_dir):
    fix = "trace the model again with --speculate 5"
    done = CliRunner().invoke(app, ["generate", str(artifact), "for", "--speculate", "5"])
    assert done.exit_code == 1 and fix in str(done.exception)
    with real_server(artifact, "--speculate", "5", wait=False) as server:
        assert server.wait(600) != 0
        assert server.log.count(fix) == 1 and "starting" not in server.log  # once, and before the ranks are there
    with real_server(artifact, "--lora", "fr=nowhere", wait=False) as server:
        assert server.wait(600) != 0
        assert "lora = 'fr=nowhere': this artifact has no slots" in server.log and "starting" not in server.log
    _, done = trace(model_dir, "none", "--speculate", "7")
    assert done.exit_code != 0 and "a step of 8 tokens verifies guesses" in str(done.exception)
