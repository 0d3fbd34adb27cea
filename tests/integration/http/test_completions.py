"""The OpenAI routes answer what the model gives: whole and streamed, through the official client and raw."""

from __future__ import annotations

import concurrent.futures
import math

import numpy as np
import openai
import pytest

from tests.support.engine.toy_model import logits_of
from tests.support.http.http_servers import events_of, is_error

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO, RENDERED = [{"role": "user", "content": "hello"}], "user:hello;assistant:"


@pytest.fixture(scope="module")
def client(toy):
    with openai.OpenAI(base_url=toy.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.smoke
def test_a_completion_through_the_official_client(client, toy, expect):
    answer = client.completions.create(model="toy", prompt="hello", max_tokens=9, temperature=0)
    _, text, reason = expect("hello", max_tokens=9)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == "toy"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (text, reason, 0, None)
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.total_tokens == 5 + answer.usage.completion_tokens
    body = {"prompt": "hello", "max_tokens": 9, "temperature": 0, "stream": True}
    *events, done = events_of(toy.post(COMPLETIONS, body).text)
    assert done == "[DONE]" and "".join(event["choices"][0]["text"] for event in events) == text
    assert events[-1]["choices"][0]["finish_reason"] == reason and all("usage" not in event for event in events)
    *events, last, _ = events_of(toy.post(COMPLETIONS, {**body, "stream_options": {"include_usage": True}}).text)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == answer.usage.completion_tokens
    assert all(event["usage"] is None for event in events)


def test_the_default_is_sixteen_tokens_or_what_is_left_and_in_chats_the_maximum(client):
    ask = {"model": "toy", "temperature": 0, "extra_body": {"ignore_eos": True}}
    for prompt, count in (("hello", 16), ([2] * 60, 4), ([[7, 8], [2] * 62], 16 + 2)):
        answer = client.completions.create(**ask, prompt=prompt)
        assert answer.usage.completion_tokens == count and answer.choices[-1].finish_reason == "length"
    answer = client.completions.create(**ask, prompt=[2] * 64, max_tokens=1)
    assert answer.usage.completion_tokens == 1
    chat = client.chat.completions.create(**ask, messages=HELLO)
    assert chat.usage.total_tokens == 64 and chat.choices[0].finish_reason == "length"


def test_all_four_forms_of_a_prompt(client, expect, tokenizer):
    hello, bye = (expect(prompt, max_tokens=6)[1] for prompt in ("hello", "bye"))
    both = [tokenizer.encode("bye"), tokenizer.encode("hello")]
    for prompt, texts in (
        ("hello", [hello]),
        (["hello", "bye"], [hello, bye]),
        (both[1], [hello]),
        (both, [bye, hello]),
    ):
        answer = client.completions.create(model="toy", prompt=prompt, max_tokens=6, temperature=0)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_choices_are_numbered_by_prompt_and_differ(client):
    ask = {"model": "toy", "prompt": ["hello", "bye"], "n": 3, "seed": 7, "max_tokens": 12, "temperature": 1.0}
    answer = client.completions.create(**ask)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert answer.usage.prompt_tokens == 5 + 3  # a prompt counts once, whatever n is
    streamed = [""] * 6
    for chunk in client.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(client):
    ask = {"model": "toy", "prompt": "hello", "seed": 42, "max_tokens": 12, "temperature": 1.3}
    alone = client.completions.create(**ask).choices[0].text
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        beside = [pool.submit(client.completions.create, **{**ask, "seed": 42 if i % 2 else i}) for i in range(12)]
    texts = [future.result().choices[0].text for future in beside]
    assert all(text == alone for text in texts[1::2])
    assert len(set(texts[0::2])) > 1
    for seed in (None, -1):
        unseeded = {client.completions.create(**{**ask, "seed": seed}).choices[0].text for _ in range(4)}
        assert len(unseeded) > 1


def test_stop_strings_cut_the_text_also_across_tokens_and_in_streams(client, expect):
    _, text, _ = expect("hello", max_tokens=30, ignore_eos=True)
    stop = text[4:7]
    ask = {"model": "toy", "prompt": "hello", "max_tokens": 30, "temperature": 0, "extra_body": {"ignore_eos": True}}
    for form in (stop, [stop], ["never", stop]):
        answer = client.completions.create(**ask, stop=form)
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
    pieces, reasons = "", []
    for chunk in client.completions.create(**ask, stop=stop, stream=True):
        pieces += chunk.choices[0].text
        reasons.append(chunk.choices[0].finish_reason)
    assert pieces == text[: text.index(stop)]
    assert reasons[-1] == "stop" and set(reasons[:-1]) <= {None}


def test_logit_bias_min_tokens_and_stop_token_ids_act(client, tokenizer):
    ask = {"model": "toy", "prompt": "hello", "max_tokens": 5, "temperature": 0}
    z = tokenizer.encode("z")[0]
    answer = client.completions.create(**ask, logit_bias={str(z): 100})
    assert answer.choices[0].text == "zzzzz"
    answer = client.completions.create(**ask, logit_bias={"5": 100})
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == 1
    answer = client.completions.create(**ask, logit_bias={"5": 100}, extra_body={"min_tokens": 3})
    assert answer.usage.completion_tokens == 4
    answer = client.completions.create(**ask, logit_bias={str(z): 100}, extra_body={"stop_token_ids": [z]})
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")


def test_echo_puts_the_prompt_before_the_text(client, expect, tokenizer):
    _, text, _ = expect("hello", max_tokens=4)
    ask = {"model": "toy", "max_tokens": 4, "temperature": 0, "echo": True}
    assert client.completions.create(**ask, prompt="hello").choices[0].text == "hello" + text
    assert client.completions.create(**ask, prompt=tokenizer.encode("hello")).choices[0].text == "hello" + text
    chunks = [chunk.choices[0].text for chunk in client.completions.create(**ask, prompt="hello", stream=True)]
    assert "".join(chunks) == "hello" + text


def test_logprobs_of_completions(client, expect, tokenizer):
    tokens, _, _ = expect("hello", max_tokens=6)
    ask = {"model": "toy", "prompt": "hello", "max_tokens": 6, "temperature": 0, "logprobs": 3}
    table = client.completions.create(**ask).choices[0].logprobs
    prefix = tokenizer.encode("hello")
    for place, token in enumerate(tokens):
        logits = logits_of(np.array(prefix + tokens[:place]))
        logs = logits - math.log(sum(math.exp(value) for value in logits))
        assert table.token_logprobs[place] == pytest.approx(float(logs[token]), abs=1e-4)
        assert len(table.top_logprobs[place]) == 3
        assert max(table.top_logprobs[place].values()) == pytest.approx(float(logs.max()), abs=1e-4)
    assert table.text_offset[0] == 0 and table.text_offset == sorted(table.text_offset)
    streamed = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**ask, stream=True):
        if chunk.choices[0].logprobs:
            for name, values in streamed.items():
                values.extend(getattr(chunk.choices[0].logprobs, name))
    assert streamed == {name: getattr(table, name) for name in streamed}
    none = client.completions.create(**{**ask, "logprobs": 0}).choices[0].logprobs
    assert len(none.tokens) == 6
    assert none.top_logprobs == [dict([pair]) for pair in zip(none.tokens, none.token_logprobs, strict=True)]
    sampled = {**ask, "temperature": 2, "seed": 5, "logprobs": 1, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    table = client.completions.create(**sampled).choices[0].logprobs
    assert any(len(top) == 2 for top in table.top_logprobs)  # the likeliest, and the chosen one where it is another
    for token, logprob, top in zip(table.tokens, table.token_logprobs, table.top_logprobs, strict=True):
        assert top[token] == logprob


@pytest.mark.smoke
def test_chat_through_the_official_client(client, expect):
    messages = [
        {"role": "developer", "content": "brief"},
        {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    ]
    answer = client.chat.completions.create(model="toy", messages=messages, max_completion_tokens=6, temperature=0)
    prompt = "system:brief;user:hel\nlo;assistant:"
    _, text, reason = expect(prompt, max_tokens=6)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (text, "assistant", reason)
    assert choice.message.tool_calls is None and choice.logprobs is None
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.smoke
def test_a_chat_stream_has_openais_chunks(client, toy, expect):
    ask = {"model": "toy", "messages": HELLO, "max_tokens": 7, "temperature": 0, "n": 2, "stream": True}
    _, text, reason = expect(RENDERED, max_tokens=7)
    chunks = list(client.chat.completions.create(**ask, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and len({chunk.created for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert "".join(choice.delta.content or "" for choice in mine) == text
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + [reason]
    assert chunks[-1].choices == [] and all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 14 and chunks[-1].usage.prompt_tokens == len(RENDERED)

    response = toy.post(CHAT, {**ask, "n": 1})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = events_of(response.text)
    assert events[-1] == "[DONE]" and "usage" not in events[0]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]].count(None) == len(events) - 2


def test_logprobs_of_chat(client, tokenizer, expect):
    ask = {"model": "toy", "messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True}
    tokens, _, _ = expect(RENDERED, max_tokens=5)
    content = client.chat.completions.create(**ask, top_logprobs=2).choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in content] == [tokenizer.token_bytes(token) for token in tokens]
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob)  # greedy
    streamed = []
    for chunk in client.chat.completions.create(**ask, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed.extend(chunk.choices[0].logprobs.content)
    assert streamed == content
    assert client.chat.completions.create(**ask).choices[0].logprobs.content[0].top_logprobs == []


def test_usage_says_what_of_the_prompt_was_in_the_cache(toy, expect):
    prompt = "the same instructions for every question; "
    body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "cache_salt": "mine"}
    before = toy.metric("nxd_prefix_cache_hits_total")

    def cached(**more):
        answer = toy.post(COMPLETIONS, {**body, **more}).json()
        assert answer["choices"][0]["text"] == expect(prompt, max_tokens=6)[1]
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]

    first, length = cached()
    assert first == 0 and cached() == (length - 1, length)
    assert cached(cache_salt="yours")[0] == cached(cache_prompt=False)[0] == cached(cache_prompt=False)[0] == 0
    streamed = toy.post(COMPLETIONS, {**body, "stream": True, "stream_options": {"include_usage": True}})
    usage = events_of(streamed.text)[-2]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == length - 1
    assert toy.metric("nxd_prefix_cache_hits_total") == before + 2 * (length - 1)
    # A prompt counts once, whatever n is, and by its first choice to end.
    both = toy.post(COMPLETIONS, {**body, "prompt": [prompt, prompt + "why?"], "n": 2}).json()["usage"]
    assert both["prompt_tokens_details"]["cached_tokens"] <= 2 * length < both["prompt_tokens"]
    answer = toy.post(COMPLETIONS, {**body, "cache_salt": "x" * 257})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_models_buckets_and_version(client, toy):
    (model,) = client.models.list().data
    assert model.id == "toy" and model.object == "model" and model.owned_by
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    before = {bucket["name"]: bucket["executions"] for bucket in toy.get("/v1/buckets").json()["data"]}
    client.completions.create(model="toy", prompt="hello", max_tokens=2, temperature=0)
    after = {bucket["name"]: bucket for bucket in toy.get("/v1/buckets").json()["data"]}
    assert after["prefill_s8"]["executions"] == before["prefill_s8"] + 1
    # -1 stands for the token that the step before it chose.
    assert after["prefill_s8"]["inputs"][0] == {"name": "tokens", "dtype": "int64", "shape": [1, 8], "minimum": -1}
    assert set(toy.get("/version").json()) == {"version", "torch", "python"}


def test_documents_variables_and_parts_reach_the_template(toy):
    parts = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("hello", "you")]}]
    more = {"documents": [{"text": "dry"}], "chat_template_kwargs": {"shout": True}}
    tokens = toy.post("/tokenize", {"messages": parts, **more}).json()["tokens"]
    prompt = toy.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert prompt == "dry;user:hello\nyou;LOUD;assistant:"
    answer = toy.post("/v1/chat/completions", {"messages": parts, "max_tokens": 1, **more}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    for name in ("documents", "chat_template_kwargs"):
        is_error(toy.post("/tokenize", {"prompt": "hello", name: more[name]}), 400, name)


def test_tokenize_and_detokenize(toy, tokenizer):
    text = "hello é中😀!"
    answer = toy.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 64 and len(answer["token_strs"]) == answer["count"]
    assert toy.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert toy.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert toy.post("/tokenize", {"messages": HELLO}).json()["tokens"] == tokenizer.encode(RENDERED)


@pytest.mark.smoke
def test_sagemakers_routes(toy, expect):
    assert toy.get("/ping").status_code == 200
    _, text, _ = expect("hello", max_tokens=5)
    body = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    assert toy.post("/invocations", body).json()["choices"][0]["text"] == text
    events = events_of(toy.post("/invocations", {**body, "stream": True}).text)
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == text
    assert toy.post("/invocations", {"messages": HELLO, "max_tokens": 3}).json()["object"] == "chat.completion"
    is_error(toy.post("/invocations", {"prompt": "a", "suffix": "b"}), 400, "suffix")
