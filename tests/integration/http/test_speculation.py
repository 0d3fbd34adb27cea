"""Speculation as a user meets it: traced, served and generated with through the command line, streamed, measured."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from nxd_infer.cli.main import app
from tests.support.http.http_artifacts import LLAMA, greedy_texts, real_server, trace_tiny
from tests.support.http.http_servers import events_of, logged

COMPLETIONS = "/v1/completions"
PROMPT = "the with for the with for the with for the with"
SAME = {"7": 100}
"""A bias that makes every token the same one: all guesses are right."""


@pytest.fixture(scope="module")
def artifact():
    return trace_tiny("llama", "generate", tp=1, **LLAMA, speculate=3)


@pytest.fixture(scope="module")
def server(artifact):
    with real_server(artifact, "--speculate", "3") as server:
        yield server


def ask(server, **more):
    body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200, answer.text
    return answer


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_answers_are_the_models_own_and_the_metrics_count_the_guesses(server, artifact):
    expected = greedy_texts(artifact.parent / "model", [PROMPT], 24)[PROMPT]
    before = server.metric("nxd_generation_tokens_total")
    answer = ask(server).json()
    assert answer["choices"][0]["text"] == expected
    assert answer["usage"]["completion_tokens"] == 24
    # Long enough that some guesses are verified however slow the graph was when the server measured it.
    same = ask(server, logit_bias=SAME, max_tokens=80).json()
    word = server.post("/detokenize", {"tokens": [7]}).json()["prompt"]
    assert same["choices"][0]["text"] == word * 80 and same["usage"]["completion_tokens"] == 80
    guessed = server.metric("nxd_spec_decode_num_draft_tokens_total")
    assert 0 < server.metric("nxd_spec_decode_num_accepted_tokens_total") <= guessed
    # One row may decode in a graph of four, where that was measured to be no slower.
    assert sum(server.metric("nxd_bucket_executions_total", graph=f"verify_b{batch}") for batch in (1, 4)) > 0
    assert server.metric("nxd_generation_tokens_total") == before + 104
    cut = ask(server, logit_bias=SAME, stop=[word * 6]).json()  # within a run of right guesses
    assert cut["choices"][0]["text"] == "" and cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == 6


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


def test_generate_says_the_same_with_guesses_and_tells_how_many_were_right(artifact):
    asked = ("generate", artifact, PROMPT, "--max-tokens", 40)
    plain, guessing = (command(*asked, "--json", *more).output for more in ([], ["--speculate", "3"]))
    assert plain == guessing and json.loads(plain.splitlines()[0])["tokens"] > 0
    told = command(*asked, "--speculate", "3").output
    found = re.search(r"\[speculation: (\d+) of (\d+) guessed tokens were right\]", told)
    assert found and int(found[1]) <= int(found[2]), told  # how many depends on what the graphs take


def test_the_traced_graphs_equal_the_plain_model(artifact):
    done = command("verify", artifact, artifact.parent / "model")
    assert done.exit_code == 0 and "verify_b4" in done.output and "all " in done.output, done.output


def test_more_than_was_traced_is_refused_with_the_fix(artifact, tmp_path, capfd):
    """Once, and before the ranks are there."""
    from nxd_server.__main__ import main

    fix = "trace the model again with --speculate 5"
    done = command("generate", artifact, "for", "--speculate", 5)
    assert done.exit_code == 1 and fix in str(done.exception)
    for option, words in (
        (("--speculate", "5"), fix),
        (("--lora", "fr=nowhere"), "lora = 'fr=nowhere': this artifact has no slots"),
    ):
        assert main([str(artifact), "--port", "0", *option]) == 1
        told = logged(capfd, words)
        assert told.count(words) == 1 and "starting" not in told
    sizes = ("--batch-sizes", "1,4", "--prompt-buckets", "8,16", "--max-len", 128, "--speculate", 7)
    done = command("trace", artifact.parent / "model", "--out", tmp_path / "none", *sizes)
    assert done.exit_code != 0 and "a step of 8 tokens verifies guesses" in str(done.exception)
