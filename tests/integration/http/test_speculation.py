"""Speculation as a user meets it: traced, served and generated with through the command line, streamed, measured."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from typer.testing import CliRunner

from nxd_infer.cli.main import app
from nxd_server.app.run import serve
from nxd_server.settings import ServerSettings
from tests.support.http.http_artifacts import LLAMA, ONE_LAYER, PROMPTS, greedy_texts, real_server, trace_tiny
from tests.support.http.http_servers import events_of, logged, wait_for
from tests.support.http.load import TOKENS, Load, rank_pids
from tests.support.processes import descendants, name_of
from tests.support.tiny_models import write_tiny

PROMPT = "the with for the with for the with for the with"
SAME = {"7": 100}
"""A bias that makes every token the same one: all guesses are right."""


@pytest.fixture(scope="module")
def artifact():
    return trace_tiny("llama", "generate", tp=1, **LLAMA, speculate=3)


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_answers_are_the_models_own_whole_and_streamed_and_the_metrics_count_the_guesses(artifact):
    expected = greedy_texts(artifact.parent / "model", [PROMPT], 24)[PROMPT]
    with real_server(artifact, "--speculate", "3") as server:

        def ask(**more):
            body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
            answer = server.post("/v1/completions", body)
            assert answer.status_code == 200, answer.text
            return answer

        assert ask().json()["choices"][0]["text"] == expected
        # Long enough that some guesses are verified however slow the graph was when the server measured it.
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *events, last, _ = events_of(ask(logit_bias=SAME, max_tokens=80, logprobs=1, **more).text)
        word = server.post("/detokenize", {"tokens": [7]}).json()["prompt"]
        parts = [event["choices"][0] for event in events]
        assert "".join(part["text"] for part in parts) == word * 80 and last["usage"]["completion_tokens"] == 80
        assert sum(len(part["logprobs"]["tokens"]) for part in parts if part["logprobs"]) == 80
        guessed = server.metric("nxd_spec_decode_num_draft_tokens_total")
        assert 0 < server.metric("nxd_spec_decode_num_accepted_tokens_total") <= guessed
        # One row may decode in a graph of four, where that was measured to be no slower.
        assert sum(server.metric("nxd_bucket_executions_total", graph=f"verify_b{batch}") for batch in (1, 4)) > 0
        assert server.metric("nxd_generation_tokens_total") == 104
        cut = ask(logit_bias=SAME, stop=[word * 6]).json()  # within a run of right guesses
        assert cut["choices"][0]["text"] == "" and cut["choices"][0]["finish_reason"] == "stop"
        assert cut["usage"]["completion_tokens"] == 6


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


def test_more_than_was_traced_is_refused_with_the_fix(artifact, capfd):
    """Once, and before the ranks are there."""
    fix = "trace the model again with --speculate 5"
    done = command("generate", artifact, "for", "--speculate", 5)
    assert done.exit_code == 1 and fix in str(done.exception)
    for settings, words in (
        ({"speculate": 5}, fix),
        ({"lora": ["fr=nowhere"]}, "lora = 'fr=nowhere': this artifact has no slots"),
    ):
        assert serve(artifact, ServerSettings.resolve(port=0, **settings)) == 1
        told = logged(capfd, words)
        assert told.count(words) == 1 and "starting" not in told
    silent = trace_tiny("llama", "generate", tp=1, **LLAMA)
    assert serve(silent, ServerSettings.resolve(port=0, draft=str(artifact))) == 1
    words = f"--draft {artifact}: the model {silent} was traced without a graph that verifies guesses; trace the model"
    assert f"{words} again with --speculate 4" in logged(capfd, words)


# --- a draft model ---


@pytest.fixture(scope="module")
def guessing(artifact):
    """A server whose draft is the model itself: every guess is right, and none pays but in a trial."""
    with real_server(artifact, "--draft", str(artifact)) as server:
        yield server


def test_with_a_draft_answers_are_the_models_own_whether_greedy_or_drawn(artifact, guessing):
    prompts, drawn = PROMPTS[:4], {"temperature": 0.9, "seed": 11, "top_p": 0.95}
    texts = greedy_texts(artifact.parent / "model", prompts, 60)
    plain = {"max_tokens": 60, "ignore_eos": True}
    with real_server(artifact) as alone:
        expected = alone.post("/v1/completions", {"prompt": prompts, **plain, **drawn}).json()["choices"]

    def ask(**more):
        return guessing.post("/v1/completions", {"prompt": prompts, **plain, **more}).json()["choices"]

    for _ in range(2):  # what an answer before has left in the slots changes nothing
        assert [choice["text"] for choice in ask(temperature=0)] == [texts[prompt] for prompt in prompts]
        assert [choice["text"] for choice in ask(**drawn)] == [choice["text"] for choice in expected]
    guessed = guessing.metric("nxd_spec_decode_num_draft_tokens_total")
    assert guessing.metric("nxd_spec_decode_num_accepted_tokens_total") == guessed > 0
    assert len(rank_pids(guessing)) == 1, "its health is the model's"
    assert guessing.log.count(f"the draft model {artifact} guesses up to 3 tokens a step") == 1


def test_a_draft_killed_under_load_changes_no_answer_and_comes_back(artifact, guessing):
    texts = greedy_texts(artifact.parent / "model", PROMPTS, TOKENS)
    ranks = {pid for pid in descendants(guessing.process.pid) if name_of(pid) == "nxd rank 0"}
    (pid,) = ranks - {*rank_pids(guessing)}
    assert guessing.get("/health").json()["draft"] == {"ready": True, "restarts": 0}
    with Load(guessing, texts) as load:
        wait_for(lambda: len(load.answers) > 10)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: "the draft model guesses again" in guessing.log)
        seen = len(load.answers)
        wait_for(lambda: len(load.answers) > seen + 20)
    assert guessing.get("/health").json()["draft"] == {"ready": True, "restarts": 1}
    assert not load.refused and not load.cut and not load.wrong
    assert "answers go on without it" in guessing.log and guessing.metric("nxd_engine_restarts_total") == 0
    assert guessing.stop() == 0 and not descendants(guessing.process.pid)


def test_generate_takes_a_draft(artifact):
    asked = ("generate", artifact, PROMPT, "--max-tokens", 50)
    told = command(*asked, "--draft", artifact, "--temperature", 0.7, "--seed", 2).output
    assert re.search(r"\[speculation: (\d+) of \1 guessed tokens were right\]", told), told


def test_a_draft_with_another_vocabulary_is_refused_before_the_ranks_are_there(artifact, tmp_path, capfd):
    model = write_tiny("llama", tmp_path / "model", **ONE_LAYER)
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))
    sizes = ("--batch-sizes", "4", "--prompt-buckets", "16", "--max-len", "64")
    assert command("trace", model, "--out", tmp_path / "other", *sizes).exit_code == 0
    words = "has another vocabulary than"
    assert serve(artifact, ServerSettings.resolve(port=0, draft=str(tmp_path / "other"))) == 1
    told = logged(capfd, words)
    assert told.count(words) == 1 and "give a model with the same tokenizer" in told and "starting" not in told
    assert serve(artifact, ServerSettings.resolve(port=0, draft=str(tmp_path / "nothing"))) == 1
    assert "nothing is missing" in logged(capfd, "nothing is missing")
