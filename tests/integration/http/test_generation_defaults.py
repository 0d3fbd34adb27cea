"""What generation_config.json says is how a request that says nothing is answered, whichever way it comes."""

from __future__ import annotations

import json

from nxd_server import LLM, SamplingParams
from tests.support.e2e.command import here
from tests.support.http.http_artifacts import SAMPLED, real_server, trace_sampled
from tests.support.http.http_servers import toy_server
from tests.support.tiny_models import EOS

NEUTRAL = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"prompt": "while True", "max_tokens": 16, "seed": 7}
HELLO = [{"role": "user", "content": "while True"}]


def text(server, route=COMPLETIONS, **more):
    body = {**ASKED, **more} if route == COMPLETIONS else {**ASKED, "prompt": None, "messages": HELLO, **more}
    answer = server.post(route, body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"] if route == COMPLETIONS else choice["message"]["content"]


def test_requests_that_say_nothing_are_sampled_as_the_model_says():
    artifact = trace_sampled()
    with real_server(artifact) as server:
        (card,) = server.get("/v1/models").json()["data"]
        assert card["generation_defaults"] == {**SAMPLED, "stop_token_ids": [EOS, 200]}
        for route in (COMPLETIONS, CHAT):
            silent, said = text(server, route), text(server, route, **SAMPLED)
            assert silent == said != text(server, route, **NEUTRAL)
            # What is said counts, and only that is replaced.
            mine = {"top_k": 3, "temperature": 2}
            assert text(server, route, **mine) == text(server, route, **{**SAMPLED, **mine})
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
    assert json.loads(here(*asked).out)["text"] == expected
    assert json.loads(here(*asked, "--no-generation-defaults").out)["text"] == plain


def test_a_model_that_does_not_sample_is_greedy(expect):
    with toy_server(toy={"sampling_defaults": {"temperature": 0.0}}, access_log=False) as server:
        answer = server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 8}).json()
        assert answer["choices"][0]["text"] == expect("hello", max_tokens=8)[1]
