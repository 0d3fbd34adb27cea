"""What generation_config.json says is how a request that says nothing is answered, whichever way it comes."""

from __future__ import annotations

import json

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_models.hf.generation_config import GenerationConfig
from nxd_models.serving import tasks
from nxd_server import LLM, SamplingParams
from tests.support.e2e.command import nxd_infer_here
from tests.support.http.http_artifacts import real_server, trace_tiny
from tests.support.http.http_servers import toy_server
from tests.support.tiny_models import EOS, write_tiny

SAMPLED = {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.4}
NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"prompt": "while True", "max_tokens": 16, "seed": 7}
HELLO = [{"role": "user", "content": "while True"}]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    model = {"generation": {**SAMPLED, "do_sample": True, "eos_token_id": [EOS, 200]}}
    shapes = {"batch_sizes": [1], "prompt_buckets": [16], "max_len": 64}
    return trace_tiny("llama", "generate", tmp_path_factory.mktemp("llama"), tp=1, model=model, **shapes)


def text(server, route=COMPLETIONS, **more):
    body = {**ASKED, **more} if route == COMPLETIONS else {**ASKED, "prompt": None, "messages": HELLO, **more}
    answer = server.post(route, body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"] if route == COMPLETIONS else choice["message"]["content"]


def test_requests_that_say_nothing_are_sampled_as_the_model_says(artifact, capsys, monkeypatch):
    with real_server(artifact) as server:
        (card,) = server.get("/v1/models").json()["data"]
        assert card["generation_defaults"] == {**SAMPLED, "stop_token_ids": [EOS, 200]}
        for route in (COMPLETIONS, CHAT):
            silent, said = text(server, route), text(server, route, **SAMPLED)
            assert silent == said != text(server, route, **NEUTRAL)
            # What is said counts, and only that is replaced.
            assert text(server, route, top_k=3, temperature=2) == text(
                server, route, **{**SAMPLED, "top_k": 3, "temperature": 2}
            )
            greedy = text(server, route, temperature=0)
            assert greedy == text(server, route, temperature=0, repetition_penalty=1.4, seed=8)
        assert server.post("/invocations", ASKED).json()["choices"][0]["text"] == text(server)
        expected, neutral = text(server), text(server, **NEUTRAL)
    with LLM(artifact) as llm:
        assert llm.sampling_defaults == SAMPLED
        given = SamplingParams(max_tokens=16, seed=7)  # whole: nothing of the model's is put into it
        assert llm.generate(ASKED["prompt"], given)[0].outputs[0].text == neutral
        mine = SamplingParams(max_tokens=16, seed=7, **SAMPLED)
        assert llm.generate(ASKED["prompt"], mine)[0].outputs[0].text == expected
        llm.sampling_defaults["temperature"] = 0.0
        plain = llm.generate(ASKED["prompt"], SamplingParams(max_tokens=16, temperature=0))[0].outputs[0].text
        silent, greedy = llm.generate(ASKED["prompt"]), llm.generate(ASKED["prompt"], mine.replace(temperature=0))
        assert silent[0].outputs[0].token_ids == greedy[0].outputs[0].token_ids
    asked = ("generate", artifact, ASKED["prompt"], "--max-tokens", 16, "--seed", 7, "--json")
    assert json.loads(nxd_infer_here(capsys, monkeypatch, *asked).out)["text"] == expected
    assert json.loads(nxd_infer_here(capsys, monkeypatch, *asked, "--no-generation-defaults").out)["text"] == plain
    monkeypatch.setenv("NXD_INFER_GENERATION_DEFAULTS", "false")
    with real_server(artifact) as server:
        assert text(server) == neutral
        (card,) = server.get("/v1/models").json()["data"]
        assert card["generation_defaults"] == {"stop_token_ids": [EOS, 200]}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        ({"do_sample": True, "top_p": 1, "top_k": -1}, {"top_p": 1.0, "top_k": 0}),
    ],
)
def test_what_a_file_says(tmp_path, fields, expected):
    path = write_tiny("llama", tmp_path, generation=fields)
    assert tasks.plan(path).metadata["sampling_defaults"] == expected
    SamplingParams(**expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 3}, {"temperature": "hot"}, {"top_p": 1.5}, {"min_p": True}, {"repetition_penalty": 0},
        {"top_k": 2.5}, {"do_sample": "yes"}, {"top_p": float("nan")},
    ],
)  # fmt: skip
def test_what_no_request_could_have_is_refused_by_name(tmp_path, fields):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelConfigError, match=rf"generation_config\.json: {next(iter(fields))} = "):
        GenerationConfig.of(tmp_path)


def test_a_model_that_does_not_sample_is_greedy(expect):
    with toy_server(toy={"sampling_defaults": {"temperature": 0.0}}, access_log=False) as server:
        answer = server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 8}).json()
        assert answer["choices"][0]["text"] == expect("hello", max_tokens=8)[1]
