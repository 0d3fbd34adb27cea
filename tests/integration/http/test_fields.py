"""Fields that clients of vLLM, SGLang and older OpenAI clients send: what each does, seen in the answer."""

from __future__ import annotations

import json

import pytest

from tests.support.http.http_servers import events_of, is_error

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def text_of(server, route=COMPLETIONS, **more):
    prompt = {"messages": HELLO} if route == CHAT else {"prompt": "hello"}
    answer = server.post(route, {**prompt, **GREEDY, **more})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"] if route == CHAT else choice["text"]


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_what_may_come_and_what_is_shown(toy, tokenizer, route):
    whole = text_of(toy, route)
    stop = whole[2:4]
    ended = text_of(toy, route, stop=stop, include_stop_str_in_output=True)
    assert ended == whole[: whole.index(stop) + 2]
    assert text_of(toy, route, logit_bias={"5": 100}, skip_special_tokens=False) == "<end>" * 8
    assert text_of(toy, route, logit_bias={"5": 100}) == ""
    assert set(text_of(toy, route, allowed_token_ids=tokenizer.encode("xyz"), min_tokens=8)) <= set("xyz")
    z = str(tokenizer.encode("z")[0])
    assert "z" in text_of(toy, route, logit_bias={z: 9})
    assert "z" not in text_of(toy, route, logit_bias={z: 9}, bad_words=["z"])
    is_error(toy.post(route, {"prompt": "a", "messages": HELLO, "bad_words": [3]}), 400)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_token_ids_are_returned_if_asked(toy, tokenizer, route):
    prompt = {"messages": HELLO} if route == CHAT else {"prompt": "hello"}
    body = {**prompt, **GREEDY, "return_token_ids": True, "logit_bias": {"5": 5}, "ignore_eos": False}
    answer = toy.post(route, body).json()
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if route == CHAT else choice["text"]
    ids = choice["token_ids"]
    assert len(ids) == answer["usage"]["completion_tokens"] and tokenizer.decode(ids) == text
    sent = (answer if route == CHAT else choice)["prompt_token_ids"]
    assert sent == tokenizer.encode("user:hello;assistant:" if route == CHAT else "hello")
    *chunks, _ = events_of(toy.post(route, {**body, "stream": True}).text)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert parts[0]["prompt_token_ids"] == sent
    assert [one for part in parts for one in part.get("token_ids", [])] == ids


def test_the_end_of_a_prompt_is_kept(toy, expect, tokenizer):
    long = "hello bye " * 30
    ids = tokenizer.encode(long)
    for asked, kept in ((5, 5), (-1, 64 - 8)):
        for prompt in (long, ids):
            body = {"prompt": prompt, **GREEDY, "truncate_prompt_tokens": asked, "return_token_ids": True}
            (choice,) = toy.post(COMPLETIONS, body).json()["choices"]
            assert choice["prompt_token_ids"] == ids[-kept:]
            assert choice["text"] == expect(ids[-kept:], max_tokens=8, ignore_eos=True)[1]
    echo = toy.post(COMPLETIONS, {"prompt": long, **GREEDY, "truncate_prompt_tokens": 4, "echo": True}).json()
    assert echo["choices"][0]["text"].startswith("bye ")
    chat = {"messages": [{"role": "user", "content": long}], **GREEDY, "truncate_prompt_tokens": 9}
    assert toy.post(CHAT, chat).json()["usage"]["prompt_tokens"] == 9
    for wrong in (0, 65, -2):
        is_error(toy.post(COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": wrong}), 400, "truncate_prompt_tokens")


def test_the_best_of_several_is_the_likeliest_per_token(toy):
    ask = {"prompt": "hello", "max_tokens": 6, "temperature": 1.2, "seed": 4, "logprobs": 0, "ignore_eos": True}
    answer = toy.post(COMPLETIONS, {**ask, "n": 2, "best_of": 5}).json()
    every = toy.post(COMPLETIONS, {**ask, "n": 5}).json()["choices"]
    means = {one["text"]: sum(one["logprobs"]["token_logprobs"]) / 6 for one in every}
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert [one["text"] for one in answer["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert answer["usage"]["completion_tokens"] == 30
    is_error(toy.post(COMPLETIONS, {**ask, "n": 3, "best_of": 2}), 400, "best_of")
    is_error(toy.post(COMPLETIONS, {**ask, "best_of": 2, "stream": True}), 400, "best_of")


def test_unknown_fields_that_ask_for_nothing_are_named_and_others_refused(toy):
    body = {"prompt": "hello", "max_tokens": 2}
    nothing = {"moods": [], "flag": False, "other": None, "odd, \n name": {}, "user": "me", "watermark": False}
    answer = toy.post(COMPLETIONS, {**body, **nothing})
    assert answer.headers["x-ignored-fields"] == "moods, flag, other, odd????name"
    with toy._client.stream("POST", toy.url + COMPLETIONS, json={**body, "moods": "", "stream": True}) as stream:
        assert stream.headers["x-ignored-fields"] == "moods"
    assert "x-ignored-fields" not in toy.post(COMPLETIONS, {**body, "echo": None}).headers
    for value in (True, 1, 0, "x", [0]):
        is_error(toy.post(COMPLETIONS, {**body, "moods": value}), 400, "moods", "unknown_parameter")


def test_a_message_is_continued(toy, expect):
    said = [*HELLO, {"role": "assistant", "content": "so "}]
    for route, body in (("/tokenize", {}), (CHAT, {**GREEDY, "return_token_ids": True})):
        for more in ({}, {"add_generation_prompt": False}):
            answer = toy.post(route, {"messages": said, "continue_final_message": True, **body, **more}).json()
            tokens = answer["tokens"] if route == "/tokenize" else answer["prompt_token_ids"]
            assert toy.post("/detokenize", {"tokens": tokens}).json()["prompt"] == "user:hello;assistant:so "
    answer = toy.post("/tokenize", {"messages": HELLO, "add_generation_prompt": False}).json()
    assert toy.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == "user:hello;"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    is_error(toy.post(CHAT, {"messages": said, **both}), 400, "continue_final_message")
    null = toy.post("/tokenize", {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]}).json()
    text = toy.post("/detokenize", {"tokens": null["tokens"]}).json()["prompt"]
    assert text == "user:hello;assistant:;user:hello;assistant:"


OPEN = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_older_names_of_structured_outputs(real_llama, route):
    ask = {"max_tokens": 200, "ignore_eos": False}
    assert text_of(real_llama, route, **ask, guided_choice=["left", "right"]) in ("left", "right")
    assert text_of(real_llama, route, **ask, guided_regex="[ab]{3}").strip("ab") == ""
    assert text_of(real_llama, route, **ask, guided_grammar='start: "a" "b"') == "ab"
    for schema in ({**OPEN, "additionalProperties": False}, json.dumps({**OPEN, "additionalProperties": False})):
        assert set(json.loads(text_of(real_llama, route, **ask, guided_json=schema))) == {"ok"}
    for wrong in ({"guided_regex": "(a"}, {"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}):
        prompt = {"messages": HELLO} if route == CHAT else {"prompt": "hello"}
        is_error(real_llama.post(route, {**prompt, **wrong}), 400, next(iter(wrong)))


def test_a_strict_schema_is_closed(real_llama):
    nested = {"type": "object", "properties": {"a": OPEN, "b": {"type": "array", "items": OPEN}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": nested, "strict": True}}
    for seed in range(3):
        ask = {"max_tokens": 230, "ignore_eos": False, "temperature": 1.2, "seed": seed, "response_format": form}
        text = text_of(real_llama, CHAT, **ask, logit_bias={})
        assert text.lstrip().startswith("{") and set(json.JSONDecoder().raw_decode(text)[0]) <= {"a", "b"}


def test_what_litellm_keeps_of_an_answer_may_come_back(toy):
    """``provider_specific_fields``: its copy of what an answer's message has besides OpenAI's fields."""
    first = toy.post(CHAT, {"messages": HELLO, **GREEDY}).json()["choices"][0]["message"]
    again = [*HELLO, {**first, "provider_specific_fields": {"reasoning": None}}, *HELLO]
    answer = toy.post(CHAT, {"messages": again, **GREEDY})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == toy.post(CHAT, {"messages": [*HELLO, first, *HELLO], **GREEDY}).json()["choices"]
    is_error(toy.post(CHAT, {"messages": [{**first, "other": {"a": None}}]}), 400)
