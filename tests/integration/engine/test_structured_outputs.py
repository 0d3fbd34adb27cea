"""Answers that follow a grammar: what a naive search in transformers' model gives, in any company."""

from __future__ import annotations

import re

import pytest
import torch

from nxd_server import LLM, SamplingParams
from nxd_server.errors import RequestError
from nxd_server.text.tokenizer import byte_level_bytes
from tests.support.engine.real_artifacts import GUESSES, costs_of, paying_costs, trace_llama

TOKENS = 200
CHOICES = ["yes", "yes, but", "no", "nö", "maybe 🤔", "maybe 🤗"]
FREE = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(autouse=True)
def slow_cores_may_take_longer(monkeypatch):
    monkeypatch.setattr("nxd_server.text.grammars.SECONDS", 60.0)


@pytest.fixture(scope="module")
def artifact():
    return trace_llama()[1]


@pytest.fixture(scope="module")
def llm(artifact):
    with LLM(artifact, costs=costs_of(artifact)) as llm:
        yield llm


def answers(llm, prompts, **params):
    params = SamplingParams(**{"max_tokens": TOKENS, "temperature": 0, **params})
    return [(one.text, one.finish_reason) for output in llm.generate(prompts, params) for one in output.outputs]


def searched(model, tokenizer, prompt, choices, ends):
    """The likeliest next token, again and again, of all that lead to one of ``choices``: tried one by one."""
    ids, said = tokenizer.encode(prompt), b""
    pieces = [_bytes(tokenizer, token) for token in range(tokenizer.vocab_size)]
    while True:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        wanted = [choice.encode() for choice in choices]
        allowed = [
            token
            for token, piece in enumerate(pieces)
            if (piece and any(one.startswith(said + piece) for one in wanted)) or (token in ends and said in wanted)
        ]
        best = max(allowed, key=lambda token: float(logits[token]))
        if best in ends:
            return said.decode()
        ids.append(best)
        said += pieces[best]
        if all(one == said or not one.startswith(said) for one in wanted):
            return said.decode()


def _bytes(tokenizer, token):
    """What a token of a byte-level tokenizer stands for; nothing for a special one."""
    text = tokenizer.id_to_token(token)
    return b"" if text is None or token in tokenizer.special_ids else byte_level_bytes(text)


@pytest.mark.smoke
@pytest.mark.parametrize("prompt", ["the", "for 3", "import os"])
def test_a_choice_is_the_one_that_a_naive_search_finds(llm, prompt):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(trace_llama()[0], dtype=torch.float32).eval()
    want = searched(model, llm.tokenizer, prompt, CHOICES, llm.engine.eos_token_ids)
    assert answers(llm, prompt, structured_outputs={"choice": CHOICES}) == [(want, "stop")]


@pytest.mark.parametrize("steps", ["begun ahead", "of guesses"])
def test_answers_are_the_same_in_any_company_and_however_steps_are_run(llm, artifact, steps):
    """Free and bound answers in one batch; steps that hold tokens that are not known yet, or guesses."""
    greedy = SamplingParams(max_tokens=60, temperature=0)
    few = {"type": "array", "items": {"enum": ["x", 1]}, "maxItems": 3}
    asked = [
        ("the the the", FREE.replace(logit_bias={40: 99})),
        ("for", greedy.replace(structured_outputs={"json": few})),
        ("abc abd abc", greedy.replace(temperature=1, seed=3, structured_outputs={"regex": "(abc|abd|abe){9,20}"})),
        ("the the", FREE),
        ("if", greedy.replace(structured_outputs={"choice": CHOICES})),
        ("x", FREE),
    ]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in asked]
    guesses = steps == "of guesses"
    costs = paying_costs(artifact) if guesses else costs_of(artifact)
    with LLM(artifact, costs=costs, **({"speculate": GUESSES} if guesses else {"in_process": False})) as other:
        assert other.engine.depth == (1 if guesses else 2)
        for _ in range(2):
            together = other.generate([prompt for prompt, _ in asked], [params for _, params in asked])
            assert [output.outputs[0].token_ids for output in together] == alone
        assert (other.engine.stats().accepted_tokens > 0) == guesses


def test_how_an_answer_ends(llm):
    digits = {"regex": "[0-9]{4}"}
    assert [reason for _, reason in answers(llm, "if", structured_outputs=digits)] == ["stop"]
    (cut,) = answers(llm, "if", structured_outputs={"regex": "[0-9]{40}"}, max_tokens=3)
    assert cut[1] == "length" and re.fullmatch("[0-9]{1,40}", cut[0])
    (stopped,) = answers(llm, "if", structured_outputs={"choice": ["one END two"]}, stop=["END"])
    assert stopped == ("one ", "stop")
    # A grammar's end goes before what would go on, and its own may come late where it may.
    for more in ({"min_tokens": 100}, {"ignore_eos": True}):
        assert answers(llm, "if", structured_outputs={"choice": ["yes"]}, **more) == [("yes", "stop")]
    (late,) = answers(llm, "if", structured_outputs={"regex": "[ab]*"}, min_tokens=30, temperature=1, seed=1)
    assert re.fullmatch("[ab]*", late[0]) and len(late[0]) >= 30


def test_an_answer_whose_masks_take_too_long_is_ended_alone(llm, monkeypatch):
    """Before its step begins: what other slots hold for later prompts stays."""
    asked, prompt = {"regex": "new{3}"}, "the statement that begins a long text of many words"
    answers(llm, "if", structured_outputs=asked)
    short = FREE.replace(max_tokens=4)
    llm.generate(prompt, short)
    monkeypatch.setattr("nxd_server.text.grammars.SECONDS", 0.0)
    with pytest.raises(RequestError, match=r"^structured_outputs: the grammar is too complex: it takes too long"):
        answers(llm, "if", structured_outputs=asked)
    assert llm.generate(prompt, short)[0].usage.cached_tokens > 0
