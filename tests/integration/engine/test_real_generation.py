"""A tiny traced Llama behind the engine: what transformers generates, whatever shares the batch, at degree 1 and 2."""

from __future__ import annotations

import threading

import pytest

from nxd_infer.runtime.rank_model import RankModel
from nxd_infer.trace import parallel_model_load
from nxd_server import LLM, SamplingParams
from nxd_server.engine import Engine
from nxd_server.engine.request import FinishEvent, TokenEvent
from nxd_server.errors import RequestError
from tests.support.engine.real_artifacts import (
    GUESSES,
    MAX_LEN,
    PROMPT_BUCKETS,
    costs_of,
    paying_costs,
    prompt_of,
    reference_generate,
    trace_llama,
)
from tests.support.engine.toy_model import Listener
from tests.support.processes import wait_until

EDGES = {bucket + more for bucket in PROMPT_BUCKETS for more in (-1, 0, 1)}
LENGTHS = sorted({1, 2, 33, MAX_LEN - 4, MAX_LEN - 1, MAX_LEN} | EDGES)
GREEDY = SamplingParams(max_tokens=16, temperature=0)
ASKED = [
    (prompt_of(5), GREEDY.replace(max_tokens=40, ignore_eos=True)),
    (prompt_of(30), SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=11, ignore_eos=True)),
    (prompt_of(20), SamplingParams(max_tokens=12, temperature=1.3, seed=12, repetition_penalty=1.5, min_tokens=4)),
    (prompt_of(27), SamplingParams(max_tokens=12, temperature=1.0, seed=13, frequency_penalty=0.5, top_k=20)),
]


@pytest.fixture(scope="module")
def artifact():
    return trace_llama(2)[1]


@pytest.fixture(scope="module")
def reference():
    prompts = [prompt_of(length) for length in LENGTHS]
    return dict(zip(LENGTHS, reference_generate(trace_llama(2)[0], prompts, 16), strict=True))


@pytest.fixture(scope="module")
def llm(artifact):
    with LLM(artifact, costs=costs_of(artifact)) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    """What each of ``ASKED`` is answered when nobody else asks."""
    return [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt, params in ASKED]


@pytest.fixture(scope="module")
def model(artifact):
    """The ranks alone, for engines of other kinds."""
    with parallel_model_load(artifact) as model:
        yield model


def together(engine):
    """The answers to ``ASKED``, all of which are there before the first step."""
    all_there = threading.Event()
    engine.submit([9], GREEDY.replace(max_tokens=1), lambda event: all_there.wait(60))  # on the engine's thread
    listeners = [Listener() for _ in ASKED]
    tickets = [engine.submit(*one, listener) for one, listener in zip(ASKED, listeners, strict=True)]
    all_there.set()
    assert all(ticket.wait(60) for ticket in tickets)
    return [listener.tokens[0] for listener in listeners]


@pytest.mark.smoke
def test_greedy_tokens_equal_those_of_transformers_for_every_kind_of_length(llm, reference):
    prompts = [prompt_of(length) for length in LENGTHS]
    outputs = llm.generate(prompts, [GREEDY.replace(max_tokens=min(16, llm.room(prompt))) for prompt in prompts])
    for length, output in zip(LENGTHS, outputs, strict=True):
        expected, gap = reference[length]
        if gap >= 1e-5:
            assert output.outputs[0].token_ids == expected, f"prompt of {length}"
        assert output.usage.prompt_tokens == length
        assert output.outputs[0].text == llm.tokenizer.decode(expected)


def test_every_degree_gives_the_same_greedy_and_seeded_tokens(llm, alone):
    artifact = trace_llama(1)[1]
    n_two = SamplingParams(max_tokens=12, temperature=1.0, seed=2**40 + 3, n=2)
    with LLM(artifact, costs=costs_of(artifact)) as single:
        assert together(single.engine) == alone
        both = [[one.token_ids for one in of.generate(prompt_of(9), n_two)[0].outputs] for of in (llm, single)]
    assert both[0] == both[1] and both[0][0] != both[0][1]


def test_prompts_that_ride_in_rows_of_a_decode_step_change_no_answer(model, artifact, alone):
    """With a bound on stalls, tokens of prompts take rows that decoding leaves; penalties see the same tokens."""
    with Engine(model, stall_ratio=1.0, costs=costs_of(artifact), prefix_caching=False) as bounded:
        assert together(bounded) == alone
        stats = bounded.stats()
    assert stats.bucket_steps["mixed_b20"] > 0
    rows = sum(count for name, count in stats.useful_tokens.items() if not name.startswith("prefill"))
    assert rows > stats.generated_tokens, "no token of a prompt took a row"


@pytest.mark.parametrize("slots", [1, 3])
def test_fewer_slots_than_requests_change_no_answer(model, artifact, alone, slots):
    """As where memory is short: greedy, seeded and penalised answers, each in a slot that another one has left."""
    with Engine(model, costs=costs_of(artifact), slots=slots) as engine:
        assert together(engine) == alone and together(engine) == alone
        assert engine.stats().slots == slots < len(ASKED)


@pytest.mark.parametrize("spare", [0, 1])
def test_steps_begun_ahead_over_all_ranks_change_no_answer(model, artifact, alone, monkeypatch, spare):
    """Where the ranks leave a core. Without one, only a single rank's steps are begun ahead."""
    monkeypatch.setattr(RankModel, "spare_cores", spare)
    with Engine(model, costs=costs_of(artifact)) as engine:
        assert engine.depth == 1 + spare
        assert together(engine) == alone


def test_guesses_over_all_ranks_change_no_answer(model, artifact, alone):
    with Engine(model, speculate=GUESSES, costs=paying_costs(artifact)) as engine:
        assert together(engine) == alone
        talk = [20, 21, 22, 23, 24] * 3
        engine.submit(talk, GREEDY.replace(logit_bias={21: 50.0}), Listener()).wait(60)
        assert engine.stats().accepted_tokens > 0


def test_penalties_count_the_answer_and_not_the_pieces_of_the_prompt(llm):
    """A strong presence penalty forbids repeating; a prompt in three pieces must not count as an answer."""
    prompt = prompt_of(40)
    plain = llm.generate(prompt, GREEDY.replace(ignore_eos=True))[0].outputs[0].token_ids
    once = llm.generate(prompt, GREEDY.replace(ignore_eos=True, logit_bias={plain[0]: 50}))[0].outputs[0].token_ids
    assert once == [plain[0]] * 16
    params = GREEDY.replace(ignore_eos=True, logit_bias={plain[0]: 3}, frequency_penalty=2, max_tokens=16)
    penalised = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert penalised[0] == plain[0] and penalised != once


def test_min_tokens_masks_and_logprobs_come_from_the_raw_distribution(llm):
    eos = llm.engine.eos_token_ids[0]
    biased = GREEDY.replace(logit_bias={eos: 100}, logprobs=5, min_tokens=4)
    output = llm.generate(prompt_of(6), biased)[0].outputs[0]
    assert output.token_ids[-1] == eos and len(output.token_ids) == 5 and eos not in output.token_ids[:4]
    assert output.finish_reason == "stop" and output.stop is None
    for entry in output.logprobs:
        assert len(entry.top) == 5 and entry.top[0][1] >= entry.top[-1][1] and entry.logprob <= entry.top[0][1] + 1e-6


def test_text_chat_and_streams(llm):
    whole = llm.generate("The raise statement", GREEDY)[0]
    assert whole.prompt == "The raise statement" and whole.prompt_token_ids == llm.tokenizer.encode(whole.prompt)
    events = list(llm.stream("The raise statement", GREEDY))
    assert "".join(event.text for event in events) == whole.outputs[0].text
    assert all(isinstance(event, TokenEvent) for event in events[:-1]) and isinstance(events[-1], FinishEvent)
    conversation = [{"role": "user", "content": "Why?"}]
    (answer,) = llm.chat(conversation, GREEDY)
    rendered = llm.chat_template.render(conversation)
    assert answer.prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert [one.outputs[0].token_ids for one in llm.chat([conversation] * 2, GREEDY, progress=True)] == [
        answer.outputs[0].token_ids
    ] * 2
    for event in llm.stream(prompt_of(3), GREEDY.replace(max_tokens=200, ignore_eos=True)):
        if event.index == 0:
            break  # leaving cancels
    wait_until(lambda: llm.engine.stats().running == 0)


def test_a_prompt_in_an_object_is_its_tokens_or_its_text(llm):
    ids, text = prompt_of(5), "The raise statement"
    plain = llm.generate([ids, text], GREEDY)
    for given in ({"prompt_token_ids": ids}, [{"prompt_token_ids": ids, "prompt": None}, {"prompt": text}]):
        for ours, wanted in zip(llm.generate(given, GREEDY), plain, strict=False):
            assert ours.prompt_token_ids == wanted.prompt_token_ids and ours.prompt == wanted.prompt
            assert ours.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert llm.room({"prompt_token_ids": ids}) == llm.room(ids)
    for wrong in ({}, {"text": text}, {"prompt": text, "multi_modal_data": {}}):
        with pytest.raises(RequestError, match="prompt_token_ids"):
            llm.generate(wrong, GREEDY)


def test_wrong_prompts_are_refused_and_the_engine_goes_on(llm):
    assert len(llm.generate(prompt_of(MAX_LEN - 10))[0].outputs[0].token_ids) <= 10, "a default is cut, not refused"
    for prompts in ([[1], []], [[10**6]], "\ud800"):
        with pytest.raises(RequestError):
            llm.generate(prompts, GREEDY)
    with pytest.raises(RequestError, match="2 sets of parameters"):
        llm.generate([[1]], [GREEDY, GREEDY])
    assert llm.generate([], GREEDY) == []
    assert llm.generate([7, 8], GREEDY)[0].outputs[0].finish_reason in ("stop", "length")
