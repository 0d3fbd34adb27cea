"""How an answer ends, and what is refused before it begins."""

from __future__ import annotations

import pytest

from nxd_infer.errors import ModelConfigError
from nxd_server.engine import Engine, ErrorEvent, SamplingParams
from nxd_server.errors import DeadlineExceededError, MaxTokensError, PromptTooLongError, QueueFullError, RequestError
from tests.support.engine.asking import BOTH_WAYS, GREEDY, ask, held
from tests.support.engine.toy_model import EOS, TOP, VOCAB, Listener, ToyModel, naive_generate
from tests.support.processes import wait_until


@BOTH_WAYS
def test_an_answer_ends_with_a_stop_token_unless_it_is_ignored_or_kept_away(engines):
    engine = engines()
    prompts = ([number % VOCAB, number // VOCAB] for number in range(5000))
    prompt = next(prompt for prompt in prompts if 3 <= len(naive_generate(prompt, max_tokens=12)) < 5)
    expected = naive_generate(prompt, max_tokens=12)
    result = ask(engine, prompt, GREEDY.replace(ignore_eos=False))
    assert result.tokens[0] == expected
    assert result.end.reason == "stop" and result.end.stop is None
    assert result.events[0][-2].is_stop and not result.events[0][-3].is_stop
    plain = ask(engine, prompt).tokens[0]
    assert len(plain) == 12
    late = naive_generate(prompt, max_tokens=30, min_tokens=8)
    assert len(late) > 8 and not {*late[:8]} & {*EOS}
    assert ask(engine, prompt, SamplingParams(max_tokens=30, temperature=0, min_tokens=8)).tokens[0] == late
    named = ask(engine, prompt, GREEDY.replace(stop_token_ids=[plain[6]]))
    assert named.tokens[0] == plain[: plain.index(plain[6]) + 1]
    assert named.end.reason == "stop" and named.end.stop == plain[6]


@BOTH_WAYS
def test_cancelling_frees_the_slot_for_those_who_wait(engines):
    engine = engines(model := ToyModel(slots=1))
    first, second, never = Listener(), Listener(), Listener()
    with held(model):
        long = engine.submit([1], GREEDY, first)
        wait_until(lambda: engine.stats().running)
        gone = engine.submit([3], GREEDY, never)
        short = engine.submit([2], GREEDY, second)
        assert engine.stats().waiting == 2 and engine.stats().slots_free == 0
        gone.cancel()
        long.cancel()
    assert gone.wait(60) and never.end.reason == "cancelled"
    assert never.tokens == [[]] and never.end.timings.admitted is None
    assert short.wait(60) and second.end.reason == "length"
    assert first.end.reason == "cancelled" and first.end.usage.completion_tokens == len(first.tokens[0])
    assert long.done
    long.cancel()  # harmless


@pytest.mark.parametrize("waiting", [False, True])
def test_a_deadline_ends_a_request_wherever_it_is(engines, waiting):
    now = 100.0
    engine = engines(model := ToyModel(slots=1), clock=lambda: now)
    result, other = Listener(), Listener()

    def pass_time(name, inputs):
        nonlocal now
        if (other if waiting else result).tokens[0]:  # in the middle of a step, when the slot is taken
            now = 100.2

    model.fail = pass_time
    with held(model):
        if waiting:
            engine.submit([1], GREEDY, other)
        ticket = engine.submit([2], GREEDY, result, timeout=0.15)
        wait_until(lambda: engine.stats().running)
    assert ticket.wait(60)
    assert isinstance(result.end, ErrorEvent) and isinstance(result.end.error, DeadlineExceededError)
    assert bool(result.tokens[0]) != waiting
    assert engine.stats().finished["deadline"] == 1


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1.5], {}, "prompt"),
        ([True], {}, "prompt"),
        ([1], {"logprobs": TOP + 1}, "logprobs"),
        ([1], {"stop": ["x"]}, "stop"),
        ([1], {"logit_bias": {VOCAB: 1}}, "logit_bias"),
        ([1], {"logit_bias": dict.fromkeys(range(5), 1)}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"n": 15}, "n"),
        ([1], {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),  # without a tokenizer
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_field_and_nothing_is_queued(engines, prompt, params, field):
    engine = engines(max_queued_requests=10)
    with pytest.raises(RequestError) as caught:
        engine.submit(prompt, SamplingParams(**params), Listener(20))
    assert caught.value.field == field
    assert engine.stats().submitted == 0 and engine.stats().rejected["invalid"] == 1


def test_a_prompt_over_the_maximum_names_the_limits(engines):
    with pytest.raises(PromptTooLongError, match=r"65.*64") as caught:
        engines().submit([1] * 65, GREEDY, Listener())
    assert (caught.value.prompt_tokens, caught.value.max_len) == (65, 64)


@pytest.mark.parametrize(("length", "room"), [(1, 63), (63, 1), (64, 1)])
def test_more_tokens_than_fit_are_refused_with_the_limits(engines, length, room):
    """A prompt of the whole length has room for one: the token that follows it is not fed again."""
    engine = engines()
    with pytest.raises(
        MaxTokensError, match=rf"max_tokens: {room + 1} tokens .* 64 tokens, .* leaves {room}\."
    ) as caught:
        engine.submit([1] * length, GREEDY.replace(max_tokens=room + 1), Listener())
    assert caught.value.room == room and engine.stats().rejected["invalid"] == 1
    assert len(ask(engine, [1] * length, GREEDY.replace(max_tokens=None)).tokens[0]) == room


def test_parameters_that_the_graphs_have_no_input_for_are_refused_by_name(engines):
    engine = engines(ToyModel(omit=("allowed", "bias_ids", "bias_values", "min_p", "presence_penalty")))
    for change in ({"min_tokens": 1}, {"logit_bias": {1: 1}}, {"min_p": 0.1}, {"presence_penalty": 1}):
        with pytest.raises(RequestError) as caught:
            engine.submit([1], SamplingParams(**change), Listener())
        assert caught.value.field == next(iter(change))
    assert ask(engine, [1]).end.reason == "length"


def test_the_queue_counts_free_slots_and_then_says_when_to_come_back(engines):
    engine = engines(ToyModel(slots=4, max_len=200_000, delay=0.002), max_queued_requests=2)
    endless = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    tickets = [engine.submit([1], endless, Listener()) for _ in range(6)]  # a burst that fits is never refused
    with pytest.raises(QueueFullError) as caught:
        engine.submit([1], endless, Listener())
    assert caught.value.retry_after >= 1
    wait_until(lambda: engine.stats().running == 4)
    assert engine.stats().waiting == 2 and engine.stats().rejected["queue_full"] == 1
    tickets[0].cancel()
    assert tickets[0].wait(60)
    tickets.append(engine.submit([1], endless, Listener()))
    for ticket in tickets:
        ticket.cancel()
    assert all(ticket.wait(60) for ticket in tickets)


def test_waiting_prompt_tokens_can_be_limited_too(engines):
    engine = engines(model := ToyModel(slots=1), max_queued_tokens=50)
    with held(model):
        tickets = [engine.submit([1] * 10, GREEDY, Listener())]
        wait_until(lambda: engine.stats().running == 1)
        tickets.append(engine.submit([1] * 40, GREEDY, Listener()))
        with pytest.raises(QueueFullError, match="40 prompt tokens"):
            engine.submit([1] * 20, GREEDY, Listener())
    for ticket in tickets:
        assert ticket.wait(60)


def unfed(manifest):
    spec = manifest.buckets[0].inputs[-1]
    manifest.buckets[0].inputs.append(spec.model_copy(update={"name": "pixels", "default": None}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda manifest: manifest.metadata.update(task="embed"), "task is 'embed'"),
        (lambda manifest: manifest.metadata.pop("slots"), "lacks 'slots'"),
        (lambda manifest: manifest.buckets[0].inputs.pop(1), "start"),
        (unfed, "pixels"),
    ],
)
def test_an_artifact_of_another_kind_is_refused_by_what_it_lacks(change, words):
    model = ToyModel()
    change(model.manifest)
    with pytest.raises(ModelConfigError, match=words):
        Engine(model)
