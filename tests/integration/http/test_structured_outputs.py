"""Answers of a given form over HTTP: OpenAI's response_format, vLLM's structured_outputs, calls that must be made."""

from __future__ import annotations

import concurrent.futures
import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.support.http.http_servers import is_error

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


class Report(BaseModel):
    kind: Literal["rain", "sun"]
    degrees: int = Field(ge=-40, le=40)
    places: list[Literal["Bern", "Basel"]] = Field(max_length=2)


def text_of(server, route, body):
    prompt = {"messages": HELLO} if route == CHAT else {"prompt": "Hello"}
    answer = server.post(route, {"max_tokens": 200, "temperature": 0, **prompt, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if route == CHAT else choice["text"]


def test_openais_client_parses_an_answer_into_a_class(real_client):
    for seed in range(2):
        answer = real_client.chat.completions.parse(
            model="tiny-llama", messages=HELLO, response_format=Report, temperature=1.2, seed=seed, max_tokens=200
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Report)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_both_routes_take_every_form(real_llama, route):
    described = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    assert set(json.loads(text_of(real_llama, route, {"response_format": described}))) == {"ok"}
    assert isinstance(json.loads(text_of(real_llama, route, {"response_format": {"type": "json_object"}})), dict)
    assert set(json.loads(text_of(real_llama, route, {"structured_outputs": {"json": SCHEMA}}))) == {"ok"}
    assert text_of(real_llama, route, {"structured_outputs": {"choice": ["left", "right"]}}) in ("left", "right")
    assert re.fullmatch("[0-9]{5}", text_of(real_llama, route, {"structured_outputs": {"regex": "[0-9]{5}"}}))
    assert text_of(real_llama, route, {"structured_outputs": {"grammar": 'start: "a" "b"', "json": None}}) == "ab"
    free = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    nothings = (
        {"response_format": {"type": "text", "json_schema": None}},
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False, "regex": None, "disable_any_whitespace": False}},
        {},
    )
    for nothing in nothings:
        body = {"messages": HELLO} if route == CHAT else {"prompt": "Hello"}
        (choice,) = real_llama.post(route, {**body, **free, **nothing}).json()["choices"]
        assert choice["finish_reason"] == "length"


def test_a_model_that_prefers_blanks_comes_to_the_end(real_llama):
    blanks = [
        real_llama.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] for text in " \n"
    ]
    body = {"logit_bias": {str(ids[-1]): 100 for ids in blanks}, "max_tokens": 100}
    described = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
    for asked in (described, {"structured_outputs": {"json": SCHEMA}}):
        text = text_of(real_llama, CHAT, {**body, **asked})
        assert set(json.loads(text)) == {"ok"} and "\n" in text
        asked = {**asked, "structured_outputs": {**asked.get("structured_outputs", {}), "disable_any_whitespace": True}}
        assert text_of(real_llama, CHAT, {**body, **asked}) in ('{"ok":true}', '{"ok":false}')
    for wrong in ("yes", 1):
        answer = real_llama.post(CHAT, {"messages": HELLO, "structured_outputs": {"disable_any_whitespace": wrong}})
        is_error(answer, 400, "structured_outputs.disable_any_whitespace")


def test_a_stream_and_n_choices_are_of_that_form(real_client):
    chunks = real_client.chat.completions.create(
        model="tiny-llama",
        messages=HELLO,
        n=3,
        stream=True,
        temperature=1,
        seed=1,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    )
    texts, reasons = ["", "", ""], []
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert reasons == ["stop"] * 3
    assert all(set(json.loads(text)) == {"ok"} for text in texts)


WRONG = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "mood": 1}}},
        "response_format.json_schema.mood",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"guided_regex": "a"}, "guided_regex"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_form_is_named(real_llama, body, param):
    error = is_error(real_llama.post(CHAT, {"messages": HELLO, **body}), 400, param)
    if param == "guided_regex":
        assert "use `structured_outputs`" in error["message"]


def test_a_heavy_form_delays_nobody_and_is_refused_or_kept(real_llama):
    """Expressions that are slow to compile or to match hold up no other request."""
    heavy = ["(a|b|ab)*c" * 200, "(.{1,300}x){1,300}", "(a?){5000}" + "a{5000}", "\\w{500}\\W{500}" * 20]
    with concurrent.futures.ThreadPoolExecutor(len(heavy)) as pool:
        slow = [
            pool.submit(
                real_llama.post, COMPLETIONS, {"prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": one}}
            )
            for one in heavy
        ]
        assert real_llama.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}).status_code == 200
        assert {one.result().status_code for one in slow} <= {200, 400, 500}
    assert real_llama.get("/readyz").status_code == 200
