"""Log-probabilities of prompts: those of the model, whatever runs beside them, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from nxd_server.engine import SamplingParams
from nxd_server.engine.request import PromptEvent
from nxd_server.errors import RequestError
from tests.support.engine.asking import BOTH_WAYS, GREEDY, SYSTEM, ask, held
from tests.support.engine.toy_model import ToyModel, logits_of, naive_generate

SCORED = GREEDY.replace(prompt_logprobs=3, max_tokens=5)


class Scores:
    """Collects one choice's events."""

    def __init__(self):
        self.prompt, self.tokens, self.end = None, [], None

    def __call__(self, event):
        if isinstance(event, PromptEvent):
            assert self.prompt is None and not self.tokens
            self.prompt = event.scores
        elif hasattr(event, "token"):
            self.tokens.append(event.token)
        else:
            self.end = event


def are_right(prompt, scores, count=3):
    assert len(scores) == len(prompt) - 1
    for place, (logprob, top) in enumerate(scores, 1):
        raw = logits_of(np.array(prompt[:place]))
        logs = raw - np.log(np.exp(raw).sum())
        assert logprob == pytest.approx(logs[prompt[place]], abs=1e-5)
        assert [token for token, _ in top] == np.argsort(-logs)[:count].tolist()


@BOTH_WAYS
@pytest.mark.parametrize("toy", [{}, {"prompt_rows": 3}, {"batch_sizes": (1,), "slots": 1}], ids=["", "mixed", "one"])
def test_the_scores_are_the_models_and_other_answers_stay(engines, toy, takes_steps):
    """Of prompts of one token to many, in all ways in which steps are made; sampling and what a slot holds change
    nothing."""
    engine = engines(ToyModel(**toy))
    ask(engine, SYSTEM * 2, GREEDY)
    prompts = [SYSTEM * 2, [7], SYSTEM[:2], (SYSTEM * 2)[:33]]
    with held(engine.model):
        asked = [(prompt, Scores(), SCORED.replace(temperature=one)) for one in (0, 1.5) for prompt in prompts]
        tickets = [engine.submit(prompt, params, found) for prompt, found, params in asked]
        plain = [(prompt, Scores()) for prompt in prompts]
        tickets += [engine.submit(prompt, GREEDY, found) for prompt, found in plain]
    assert all(ticket.wait(60) for ticket in tickets)
    for prompt, found, params in asked:
        are_right(prompt, found.prompt)
        if params.temperature == 0:
            assert found.tokens == naive_generate(prompt, max_tokens=5, ignore_eos=True)
        assert found.end.usage.cached_tokens == 0
    for prompt, found in plain:
        assert found.prompt is None and found.tokens == naive_generate(prompt, max_tokens=12, ignore_eos=True)


@BOTH_WAYS
def test_choices_share_the_scores_of_their_prompt_which_come_first(engines, takes_steps):
    events = []
    assert engines().submit(SYSTEM, SCORED.replace(n=3), events.append).wait(60)
    for index in range(3):
        first, *tokens, end = (event for event in events if event.index == index)
        assert isinstance(first, PromptEvent) and first.scores is events[0].scores and end.reason == "length"
        assert [one.token for one in tokens] == naive_generate(SYSTEM, max_tokens=5, ignore_eos=True)
    are_right(SYSTEM, events[0].scores)


def test_a_prompt_may_be_read_alone(engines):
    found = Scores()
    assert engines().submit(SYSTEM, SCORED.replace(max_tokens=0), found).wait(60)
    are_right(SYSTEM, found.prompt)
    assert (found.tokens, found.end.reason, found.end.usage.completion_tokens) == ([], "length", 0)


def test_rows_that_share_a_slot_save_steps(engines):
    """Of 4 slots and 12 rows more: 40 tokens are 3 steps."""
    engine = engines(ToyModel(prompt_rows=12))
    ask(engine, (SYSTEM * 2)[:40], SCORED.replace(max_tokens=1))
    assert [name for name, _ in engine.model.steps] == ["mixed_b16"] * 2 + ["mixed_b16"]


@pytest.mark.parametrize("params", [{"prompt_logprobs": 21}, {"prompt_logprobs": -1}])
def test_more_than_there_are_is_refused(engines, params):
    with pytest.raises(RequestError, match="prompt_logprobs"):
        engines().submit([1, 2], SamplingParams(**params), Scores())


def test_a_graph_without_the_mask_scores_nothing(engines):
    with pytest.raises(RequestError, match=r"prompt_logprobs.*'allowed'"):
        engines(ToyModel(omit=("allowed",))).submit([1, 2], SCORED, Scores())


@BOTH_WAYS
def test_only_allowed_tokens_come_and_no_bad_word(engines, tokenizer, takes_steps):
    engine = engines(tokenizer=tokenizer)
    letters = tokenizer.encode("abc")
    long = GREEDY.replace(max_tokens=40, temperature=2, seed=1)
    assert set(ask(engine, SYSTEM, long.replace(allowed_token_ids=letters)).tokens[0]) == set(letters)
    text = ask(engine, SYSTEM, long.replace(allowed_token_ids=letters, bad_words=["ab", "cc"])).text[0]
    assert set(text) == set("abc") and "ab" not in text and "cc" not in text
    assert "b" not in ask(engine, SYSTEM, long.replace(bad_words=["b"])).text[0]
    with_ends = long.replace(allowed_token_ids=[*letters, 5], ignore_eos=False, min_tokens=3)
    answers = [ask(engine, SYSTEM, with_ends.replace(seed=seed)).end for seed in range(6)]
    assert {answer.reason for answer in answers} == {"stop"}
    assert min(answer.usage.completion_tokens for answer in answers) > 3
    nothing = ask(engine, SYSTEM, long.replace(allowed_token_ids=letters[:1], bad_words=["a"])).end
    assert isinstance(nothing.error, RequestError) and nothing.error.field == "allowed_token_ids"
    for wrong in ({"allowed_token_ids": [97]}, {"bad_words": [""]}, {"bad_words": ["a"] * 129}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            ask(engine, SYSTEM, long.replace(**wrong))


def test_what_stopped_a_text_and_special_tokens_are_shown_if_asked(engines, tokenizer):
    def text(**more):
        return ask(engine, SYSTEM, GREEDY.replace(**{"max_tokens": 9, **more})).text[0]

    engine = engines(tokenizer=tokenizer)
    whole = text()
    stop = whole[2:4]
    end = whole.index(stop) + 2
    assert text(stop=[stop]) == whole[: end - 2] and text(stop=[stop], include_stop_str_in_output=True) == whole[:end]
    z, bias = tokenizer.encode("z")[0], {5: 100}
    assert text(stop_token_ids=[z], logit_bias={z: 100}, include_stop_str_in_output=True) == "z"
    assert text(logit_bias=bias, max_tokens=2) == ""
    assert text(logit_bias=bias, max_tokens=2, skip_special_tokens=False) == "<end><end>"
    ended = {"logit_bias": bias, "ignore_eos": False, "skip_special_tokens": False}
    assert text(**ended) == "" and text(**ended, include_stop_str_in_output=True) == "<end>"
