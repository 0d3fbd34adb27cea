"""Log-probabilities of prompts over HTTP, asked for as lm-eval asks, and equal to transformers' log-softmax."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.support.http.http_servers import events_of, is_error
from tests.support.tiny_models import EOS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = "The with statement"
CHOICES = [" opens a file", " is a loop", " you 你好", ""]


@pytest.fixture(scope="module")
def theirs(llama):
    """(tokenizer, log-probabilities of the next token behind each token of a list)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = llama.parent / "model"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(ids):
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].log_softmax(-1)

    return AutoTokenizer.from_pretrained(directory), logprobs


def asked(ids, **more):
    """As ``local-completions`` of lm-eval asks for a log-likelihood."""
    body = {"model": "tiny-llama", "prompt": ids, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    return {**body, "echo": True, **more}


@pytest.mark.smoke
def test_multiple_choice_as_lm_eval_asks_and_reads_it(real_llama, theirs):
    """A batch of contexts with continuations: their log-likelihood, and whether they are the greedy answer."""
    tokenizer, logprobs = theirs
    prompts = [tokenizer.encode(CONTEXT + choice) for choice in CHOICES]
    greedy = tokenizer.encode(CONTEXT)
    start = len(greedy)
    for _ in range(4):
        greedy.append(int(logprobs(greedy)[-1].argmax()))
    prompts.append(greedy)
    answer = real_llama.post(COMPLETIONS, asked(prompts))
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    for ids, choice in zip(prompts, choices, strict=True):
        table, expected = choice["logprobs"], logprobs(ids)
        assert {len(column) for column in table.values()} == {len(ids) + 1}
        found = table["token_logprobs"][1:-1]  # without the first token's, and the generated one's
        right = [float(expected[place, token]) for place, token in enumerate(ids[1:])]
        assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
        assert found == pytest.approx(right, abs=1e-4)
        best = expected.max(-1).values.tolist()
        assert [max(one.values()) for one in table["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)
        assert table["token_logprobs"][-1] == pytest.approx(best[-1], abs=1e-4)
        continued = zip(table["token_logprobs"][start:-1], table["top_logprobs"][start:-1], strict=True)
        is_greedy = all(one == max(top.values()) for one, top in continued)
        assert is_greedy == (expected[start - 1 : -1].argmax(-1).tolist() == ids[start:])
    for one, again in zip(choices, real_llama.post(COMPLETIONS, asked(prompts)).json()["choices"], strict=True):
        tables = one.pop("logprobs"), again.pop("logprobs")
        assert one == again and tables[0]["tokens"] == tables[1]["tokens"], "whatever the slots hold"
        scores = [table["token_logprobs"][1:] for table in tables]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)  # of other graphs, which add up in another order


def test_the_table_has_the_token_that_ends_an_answer(real_llama, theirs):
    """lm-eval takes the last entry for the one generated token, whichever it is."""
    tokenizer, logprobs = theirs
    ids = tokenizer.encode(CONTEXT)
    ending = asked(ids, max_tokens=3, logit_bias={str(EOS): 100})
    answer = real_llama.post(COMPLETIONS, ending).json()
    (choice,), right = answer["choices"], float(logprobs(ids)[-1, EOS])
    assert (choice["text"], choice["finish_reason"]) == (CONTEXT, "stop")
    assert answer["usage"]["completion_tokens"] == 1
    table = choice["logprobs"]
    assert {len(column) for column in table.values()} == {len(ids) + 1}
    assert table["token_logprobs"][-1] == pytest.approx(right, abs=1e-4)
    *chunks, _ = events_of(real_llama.post(COMPLETIONS, {**ending, "stream": True}).text)
    tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [value for one in tables if one for value in one["token_logprobs"]] == table["token_logprobs"]


def test_the_table_is_of_the_whole_text(real_llama, theirs):
    count = len(theirs[0].encode(CONTEXT))
    whole = real_llama.post(COMPLETIONS, asked(CONTEXT, max_tokens=5, logprobs=3, n=2)).json()["choices"]
    for choice in whole:
        text, table = choice["text"], choice["logprobs"]
        assert text.startswith(CONTEXT) and table["text_offset"] == sorted(table["text_offset"])
        places = table["text_offset"][: count + 1]
        assert [text[begin:end] for begin, end in itertools.pairwise(places)] == ["", *table["tokens"][1:count]]
    chunks = events_of(real_llama.post(COMPLETIONS, asked(CONTEXT, max_tokens=5, logprobs=3, n=2, stream=True)).text)
    for index, choice in enumerate(whole):
        own = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == index]
        assert "".join(one["text"] for one in own) == choice["text"]
        tables = [one["logprobs"] for one in own if one["logprobs"]]
        streamed = {name: [one for table in tables for one in table[name]] for name in tables[0]}
        for name in ("tokens", "text_offset"):
            assert streamed[name] == choice["logprobs"][name]
        for one, other in zip(streamed["top_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
            assert one == (None if other is None else pytest.approx(other, abs=1e-4))
        # Of which size the steps are, in which the second one begins beside the first, is a matter of time.
        assert streamed["token_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    alone = real_llama.post(COMPLETIONS, asked(CONTEXT, max_tokens=0)).json()
    assert alone["usage"]["completion_tokens"] == 0 and alone["choices"][0]["finish_reason"] == "length"
    assert alone["choices"][0]["text"] == CONTEXT
    scores = whole[0]["logprobs"]["token_logprobs"][:count]
    assert alone["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(scores, abs=1e-4)
    ids = real_llama.post(COMPLETIONS, {"prompt": CONTEXT, "echo": True, "max_tokens": 0}).json()["choices"][0]
    assert (ids["text"], ids["logprobs"]) == (CONTEXT, None)


def test_prompt_logprobs_as_vllm_has_them(real_llama, theirs):
    tokenizer, logprobs = theirs
    more = {"max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    choice = real_llama.post(COMPLETIONS, {"prompt": CONTEXT, **more}).json()["choices"][0]
    chat = real_llama.post(CHAT, {"messages": [{"role": "user", "content": CONTEXT}], **more}).json()
    assert choice["prompt_token_ids"] == tokenizer.encode(CONTEXT) and len(choice["token_ids"]) == 1
    for ids, found in ((one["prompt_token_ids"], one["prompt_logprobs"]) for one in (choice, chat)):
        expected = logprobs(ids)
        assert found[0] is None and len(found) == len(ids)
        for place, (token, entries) in enumerate(zip(ids[1:], found[1:], strict=True)):
            assert entries[str(token)]["logprob"] == pytest.approx(float(expected[place, token]), abs=1e-4)
            best = expected[place].topk(2).indices.tolist()
            assert [entries[str(one)]["rank"] for one in best] == [1, 2]
            assert entries[str(token)]["rank"] in (None, 1, 2) and len(entries) <= 3
            assert entries[str(best[0])]["decoded_token"] == tokenizer.decode([best[0]])
    assert chat["choices"][0]["token_ids"] and "prompt_logprobs" not in chat["choices"][0]


def test_a_chat_has_its_prompts_once_however_many_choices_it_has(real_llama, theirs):
    content = "The with statement "
    while len(theirs[0].encode(content)) < 200:
        content += "x "
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "prompt_logprobs": 20, "n": 64}
    answer = real_llama.post(CHAT, body).json()
    assert len(answer["choices"]) == 64 and len(answer["prompt_logprobs"]) >= 200
    is_error(real_llama.post(COMPLETIONS, {**body, "prompt": content, "messages": None}), 400, "prompt_logprobs")


@pytest.mark.parametrize(
    ("route", "more", "param"),
    [
        (COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 20, "prompt": [[5] * 200] * 32, "n": 2}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens"),
    ],
)
def test_what_there_is_not_is_refused(real_llama, route, more, param):
    prompt = {"messages": [{"role": "user", "content": "x"}]} if route == CHAT else {"prompt": "x y"}
    is_error(real_llama.post(route, {**prompt, **more}), 400, param)
