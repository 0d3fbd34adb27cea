"""EAGLE heads through the command line, and a server with one: compiled graphs in bfloat16, ranks that are killed."""

from __future__ import annotations

import os
import signal

import pytest
from typer.testing import CliRunner

from nxd_infer.cli.main import app
from nxd_server.app.run import serve
from nxd_server.settings import ServerSettings
from tests.support.eagle_heads import PROMPTS, models
from tests.support.http.http_artifacts import real_server
from tests.support.http.http_servers import logged, wait_for
from tests.support.http.load import rank_pids
from tests.support.processes import descendants, name_of
from tests.support.shared import shared

SIZES = ("--batch-sizes", "1,2", "--prompt-buckets", "8", "--max-len", "128", "--speculate", "3")


def trace(*arguments):
    return CliRunner().invoke(app, ["trace", *map(str, arguments), *SIZES])


@pytest.fixture(scope="module")
def artifacts():
    def make(folder):
        target, head = models() / "target", models() / "learnt-eagle3"
        for done in (
            trace(target, "--hidden-states", "eagle3", "--out", folder / "target"),
            trace(head, "--head-of", target, "--out", folder / "head"),
        ):
            assert done.exit_code == 0, (done.output, done.exception)

    return shared("eagle-served", make)


def ask(server, **more):
    body = {"prompt": PROMPTS, "max_tokens": 60, "temperature": 0, "ignore_eos": True, **more}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_a_server_with_a_head_answers_as_without_also_while_the_head_is_killed(artifacts):
    drawn = {"temperature": 0.9, "seed": 11, "top_p": 0.95}
    with real_server(artifacts / "target") as plain:
        expected, sampled = ask(plain), ask(plain, **drawn)
    with real_server(artifacts / "target", "--draft", str(artifacts / "head")) as server:
        for _ in range(3):
            assert ask(server) == expected and ask(server, **drawn) == sampled
        wait_for(lambda: ask(server) == expected and server.metric("nxd_spec_decode_num_draft_tokens_total") > 0)
        guessed = server.metric("nxd_spec_decode_num_draft_tokens_total")
        assert 0 <= server.metric("nxd_spec_decode_num_accepted_tokens_total") <= guessed
        (pid,) = {one for one in descendants(server.process.pid) if name_of(one) == "nxd rank 0"} - {*rank_pids(server)}
        os.kill(pid, signal.SIGKILL)

        def back():
            assert ask(server) == expected
            return "the draft model guesses again" in server.log

        wait_for(back)
        assert ask(server, **drawn) == sampled and "answers go on without it" in server.log
        wait_for(lambda: ask(server) == expected and server.metric("nxd_spec_decode_num_draft_tokens_total") > guessed)
        assert server.metric("nxd_engine_restarts_total") == 0


def test_a_head_is_not_served_alone_nor_verified_and_a_target_is(artifacts, capfd):
    words = "is of a head, which only guesses for another model: serve that one, with this artifact as its draft"
    assert serve(artifacts / "head", ServerSettings.resolve(port=0)) == 1
    told = logged(capfd, words)
    assert told.count(words) == 1 and "starting" not in told
    target = models() / "target"
    done = CliRunner().invoke(app, ["verify", str(artifacts / "head"), str(target)])
    assert done.exit_code == 1 and "this artifact is a head of another one" in str(done.exception)
    done = CliRunner().invoke(app, ["verify", str(artifacts / "target"), str(target)])
    assert done.exit_code == 0, (done.output, done.exception)


def test_the_command_line_says_what_a_head_needs(artifacts, tmp_path):
    for arguments, words in (
        ((models() / "random-eagle",), "is an EAGLE head: name the model that it guesses for with --head-of"),
        ((models() / "target", "--hidden-states", "eagle", "--task", "embed"), "embed"),
        ((models() / "target", "--hidden-states", "eagle", "--pp", "2"), "pipeline stages give none"),
        ((models() / "random-eagle", "--head-of", models() / "target", "--pp", "2"), "a head has no pipeline stages"),
    ):
        done = trace(*arguments, "--out", tmp_path / "out")
        assert done.exit_code == 1 and words in str(done.exception), done.exception
    assert not (tmp_path / "out").exists()
