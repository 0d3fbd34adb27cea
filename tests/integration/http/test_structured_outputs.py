"""Answers of a given form over HTTP: OpenAI's response_format, vLLM's structured_outputs, calls that must be made."""

from __future__ import annotations

import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from tests.support.http.http_servers import is_error
from tests.support.http.taught_model import VERDICT

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def described(**form):
    return {"type": "json_schema", "json_schema": form}


DESCRIBED = described(name="answer", strict=True, schema=VERDICT)


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


@pytest.mark.smoke
def test_openais_client_parses_an_answer_into_a_class(real_client):
    for seed in range(2):
        answer = real_client.chat.completions.parse(
            model="tiny-llama", messages=HELLO, response_format=Report, temperature=1.2, seed=seed, max_tokens=200
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Report)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_both_routes_take_every_form(real_llama, route):
    assert set(json.loads(text_of(real_llama, route, {"response_format": DESCRIBED}))) == {"ok"}
    assert isinstance(json.loads(text_of(real_llama, route, {"response_format": {"type": "json_object"}})), dict)
    assert set(json.loads(text_of(real_llama, route, {"structured_outputs": {"json": VERDICT}}))) == {"ok"}
    assert text_of(real_llama, route, {"structured_outputs": {"choice": ["left", "right"]}}) in ("left", "right")
    assert re.fullmatch("[0-9]{5}", text_of(real_llama, route, {"structured_outputs": {"regex": "[0-9]{5}"}}))
    assert text_of(real_llama, route, {"structured_outputs": {"grammar": 'start: "a" "b"', "json": None}}) == "ab"
    free = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    for nothing in (
        {"response_format": {"type": "text", "json_schema": None}},
        {"structured_outputs": {"json_object": False, "regex": None, "disable_any_whitespace": False}},
    ):
        body = {"messages": HELLO} if route == CHAT else {"prompt": "Hello"}
        (choice,) = real_llama.post(route, {**body, **free, **nothing}).json()["choices"]
        assert choice["finish_reason"] == "length"


def test_a_stream_and_n_choices_are_of_that_form(real_client):
    ask = {"model": "tiny-llama", "messages": HELLO, "n": 3, "temperature": 1, "seed": 1, "max_tokens": 200}
    chunks = real_client.chat.completions.create(**ask, response_format=DESCRIBED, stream=True)
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
    ({"response_format": described(schema={}, mood=1)}, "response_format.json_schema.mood"),
    ({"response_format": described(schema={"not": {}})}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": "json"}, "structured_outputs"),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_a_wrong_form_is_named(real_llama, body, param):
    is_error(real_llama.post(CHAT, {"messages": HELLO, **body}), 400, param)
