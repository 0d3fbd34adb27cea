"""The engine against the naive generator: same tokens under any traffic, typed ends, isolated failures."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch

from nxd_infer.errors import ModelConfigError, RankDiedError
from nxd_server.engine import Engine, ErrorEvent, SamplingParams
from nxd_server.engine.sequence import derive_seed
from nxd_server.errors import (
    DeadlineExceededError,
    EngineFailedError,
    EngineUnavailableError,
    GenerationError,
    MaxTokensError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from tests.engine.toy_model import EOS, TOP, VOCAB, Listener, ToyModel, naive_generate

pytestmark = pytest.mark.usefixtures("toy_takes_steps")

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def engines():
    """Makes engines and closes them; each must end with every slot free."""
    made = []

    def make(model=None, **options):
        engine = Engine(model or ToyModel(), **options)
        made.append(engine)
        engine.start()
        return engine

    yield make
    for engine in made:
        engine.close()
        assert engine.stats().slots_free == engine.slots
        assert engine._inside == engine._untold == engine._waiting_tokens == 0


def ask(engine, prompt, params=GREEDY, timeout=20.0, **options):
    listener = Listener(params.n)
    assert engine.submit(prompt, params, listener, **options).wait(timeout)
    return listener


def wait_until(condition, timeout=10.0):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


# --- the same tokens ------------------------------------------------------------------------------------


@pytest.mark.check
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 33, 51, 52, 60, 62, 63, 64])
def test_greedy_tokens_equal_the_naive_ones_for_every_kind_of_length(engines, length):
    prompt = [(7 * place) % VOCAB for place in range(length)]
    room = max(1, 64 - length)
    result = ask(engines(), prompt, GREEDY.replace(max_tokens=min(12, room)))
    assert result.tokens[0] == naive_generate(prompt, max_tokens=12, ignore_eos=True, max_len=64)
    assert result.end.reason == "length"
    assert result.end.usage.prompt_tokens == length
    assert result.end.usage.completion_tokens == len(result.tokens[0]) == min(12, room)


@pytest.mark.check
@pytest.mark.parametrize(("seed", "prompt_rows"), [(0, 0), (1, 0), (2, 0), (0, 5), (1, 16)])
def test_random_traffic_with_cancellations_gives_everyone_their_own_tokens(engines, seed, prompt_rows):
    """From several threads at once: lengths, parameters, seeds, cancellations at any moment."""
    model = ToyModel(slots=3, max_len=48, prompt_buckets=(4, 8), delay=0.0002, prompt_rows=prompt_rows)
    engine = engines(model, max_queued_requests=10**6)
    failures = []

    def client(number):
        rng = random.Random(seed * 100 + number)
        for _ in range(10):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
            room = min(20, 48 - len(prompt))
            params = SamplingParams(
                max_tokens=rng.randint(1, room), temperature=rng.choice([0, 0, 0.7, 1.5]), top_k=rng.choice([0, 3]),
                seed=rng.randrange(2**63), ignore_eos=rng.random() < 0.5, min_tokens=0,
            )  # fmt: skip
            expected = naive_generate(
                prompt, max_tokens=params.max_tokens, temperature=params.temperature, top_k=params.top_k,
                seed=params.seed, ignore_eos=params.ignore_eos, max_len=48,
            )  # fmt: skip
            listener = Listener()
            ticket = engine.submit(prompt, params, listener)
            cancelled = rng.random() < 0.3
            if cancelled:
                time.sleep(rng.random() * 0.01)
                ticket.cancel()
            if not ticket.wait(30):
                failures.append("never finished")
            elif listener.end.reason == "cancelled":
                if not cancelled or listener.tokens[0] != expected[: len(listener.tokens[0])]:
                    failures.append((expected, listener.tokens[0]))
            elif listener.tokens[0] != expected:
                failures.append((expected, listener.tokens[0]))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert any(len(set(slots)) < len(slots) for _, slots in model.steps) == (prompt_rows > 0)
    stats = engine.stats()
    assert sum(stats.finished.values()) == stats.submitted == 80
    assert stats.running == stats.waiting == stats.waiting_tokens == 0 and stats.kv_usage == 0


def test_a_seeded_answer_is_the_same_alone_and_in_a_crowd(engines):
    engine = engines(ToyModel(delay=0.001))
    params = SamplingParams(max_tokens=20, temperature=1.2, seed=42, ignore_eos=True)
    prompt = [3, 1, 4, 1, 5]
    alone = ask(engine, prompt, params).tokens[0]
    crowd = [Listener() for _ in range(7)]
    for number, listener in enumerate(crowd):
        engine.submit([number] * (number + 3), SamplingParams(max_tokens=30, seed=number), listener)
    assert ask(engine, prompt, params).tokens[0] == alone


def test_n_choices_have_seeds_of_their_own_and_the_first_has_the_requests(engines):
    engine = engines()
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=7, n=6, ignore_eos=True)
    result = ask(engine, [1, 2, 3], params)
    for index in range(6):
        expected = naive_generate(
            [1, 2, 3], max_tokens=10, temperature=1.0, seed=derive_seed(7, index), ignore_eos=True
        )
        assert result.tokens[index] == expected
    assert len({tuple(tokens) for tokens in result.tokens}) == 6


def test_without_a_seed_two_answers_differ(engines):
    engine = engines()
    params = SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True)
    assert ask(engine, [1], params).tokens != ask(engine, [1], params).tokens


# --- ends -----------------------------------------------------------------------------------------------


def find_prompt(condition):
    """A short prompt whose naive greedy answer fulfils ``condition``."""
    for number in range(5000):
        prompt = [number % VOCAB, number // VOCAB]
        if condition(naive_generate(prompt, max_tokens=30)):
            return prompt
    raise AssertionError("no such prompt")


def test_end_of_sequence_ends_the_answer_unless_it_is_ignored(engines):
    engine = engines()
    prompt = find_prompt(lambda tokens: 3 <= len(tokens) < 12)
    expected = naive_generate(prompt, max_tokens=12)
    result = ask(engine, prompt, GREEDY.replace(ignore_eos=False))
    assert result.tokens[0] == expected and expected[-1] in EOS
    assert result.end.reason == "stop" and result.end.stop is None
    assert result.events[0][-2].is_stop and not result.events[0][-3].is_stop
    assert len(ask(engine, prompt).tokens[0]) == 12


def test_min_tokens_keeps_the_end_away(engines):
    engine = engines()
    prompt = find_prompt(lambda tokens: len(tokens) < 5 and tokens[-1] in EOS)
    expected = naive_generate(prompt, max_tokens=30, min_tokens=8)
    assert len(expected) > 8 and not {*expected[:8]} & {*EOS}
    assert ask(engine, prompt, SamplingParams(max_tokens=30, temperature=0, min_tokens=8)).tokens[0] == expected


def test_stop_token_ids_end_the_answer_and_are_named(engines):
    engine = engines()
    plain = naive_generate([9, 9], max_tokens=12, ignore_eos=True)
    stop = plain[4]
    result = ask(engine, [9, 9], GREEDY.replace(stop_token_ids=[stop]))
    assert result.tokens[0] == plain[: plain.index(stop) + 1]
    assert result.end.reason == "stop" and result.end.stop == stop


def test_logit_bias_acts_on_the_named_tokens(engines):
    engine = engines()
    result = ask(engine, [1, 2], GREEDY.replace(logit_bias={"11": 100, 12: -100.0}))
    assert result.tokens[0] == [11] * 12


def test_logprobs_are_sorted_and_as_many_as_asked_for(engines):
    engine = engines()
    result = ask(engine, [1, 2], GREEDY.replace(logprobs=5))
    for event in result.events[0][:-1]:
        values = [value for _, value in event.top]
        assert len(values) == 5 and values == sorted(values, reverse=True)
        assert event.top[0] == (event.token, pytest.approx(event.logprob))
    assert ask(engine, [1, 2], GREEDY.replace(logprobs=0)).events[0][0].top == ()


def test_cancelling_frees_the_slot_for_those_who_wait(engines):
    engine = engines(ToyModel(slots=1, max_len=4096, delay=0.002))
    first, second = Listener(), Listener()
    long = engine.submit([1], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True), first)
    wait_until(lambda: first.tokens[0])
    short = engine.submit([2], GREEDY, second)
    assert engine.stats().waiting == 1 and engine.stats().slots_free == 0
    long.cancel()
    assert short.wait(5) and second.end.reason == "length"
    assert first.end.reason == "cancelled" and first.end.usage.completion_tokens == len(first.tokens[0])
    assert long.done
    long.cancel()  # harmless


def test_a_waiting_request_can_be_cancelled_before_it_ever_had_a_slot(engines):
    engine = engines(ToyModel(slots=1, max_len=4096, delay=0.002))
    blocker = engine.submit([1], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True), Listener())
    listener = Listener()
    ticket = engine.submit([2], GREEDY, listener)
    ticket.cancel()
    assert ticket.wait(5)
    assert listener.end.reason == "cancelled" and listener.tokens == [[]] and listener.end.timings.admitted is None
    blocker.cancel()


@pytest.mark.parametrize("waiting", [False, True])
def test_a_deadline_ends_a_request_wherever_it_is(engines, waiting):
    engine = engines(ToyModel(slots=1, max_len=4096, delay=0.002))
    endless = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    if waiting:
        engine.submit([1], endless, Listener())
    started = time.monotonic()
    result = Listener()
    ticket = engine.submit([2], endless, result, timeout=0.15)
    assert ticket.wait(5) and time.monotonic() - started < 2
    assert isinstance(result.end, ErrorEvent) and isinstance(result.end.error, DeadlineExceededError)
    assert bool(result.tokens[0]) != waiting
    assert engine.stats().finished["deadline"] == 1


# --- admission ------------------------------------------------------------------------------------------


@pytest.mark.check
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
    assert (caught.value.prompt_tokens, caught.value.max_prompt_tokens, caught.value.max_len) == (65, 64, 64)


@pytest.mark.check
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
    engine = engines(ToyModel(slots=4, max_len=4096, delay=0.002), max_queued_requests=2)
    endless = SamplingParams(max_tokens=None, temperature=0, ignore_eos=True)
    tickets = [engine.submit([1], endless, Listener()) for _ in range(6)]  # a burst that fits is never refused
    with pytest.raises(QueueFullError) as caught:
        engine.submit([1], endless, Listener())
    assert caught.value.retry_after >= 1
    wait_until(lambda: engine.stats().running == 4)
    assert engine.stats().waiting == 2 and engine.stats().rejected["queue_full"] == 1
    tickets[0].cancel()
    assert tickets[0].wait(5)
    tickets.append(engine.submit([1], endless, Listener()))
    for ticket in tickets:
        ticket.cancel()
    assert all(ticket.wait(5) for ticket in tickets)


def test_waiting_prompt_tokens_can_be_limited_too(engines):
    engine = engines(ToyModel(slots=1, max_len=64, delay=0.01), max_queued_tokens=50)
    tickets = [engine.submit([1] * 10, GREEDY, Listener())]
    wait_until(lambda: engine.stats().running == 1)
    tickets.append(engine.submit([1] * 40, GREEDY, Listener()))
    with pytest.raises(QueueFullError, match="40 prompt tokens"):
        engine.submit([1] * 20, GREEDY, Listener())
    for ticket in tickets:
        assert ticket.wait(10)


@pytest.mark.parametrize("meta", [{"task": "embed"}, {"task": "generate"}])
def test_an_artifact_of_another_kind_is_refused(meta):
    model = ToyModel()
    model.manifest.metadata = meta
    with pytest.raises(ModelConfigError):
        Engine(model)


def test_an_input_that_nobody_feeds_is_refused_by_name():
    model = ToyModel()
    spec = model.manifest.buckets[0].inputs[-1]
    model.manifest.buckets[0].inputs.append(spec.model_copy(update={"name": "pixels", "default": None}))
    with pytest.raises(ModelConfigError, match="pixels"):
        Engine(model)
    model = ToyModel()
    model.manifest.buckets[0].inputs = [s for s in model.manifest.buckets[0].inputs if s.name != "start"]
    with pytest.raises(ModelConfigError, match="start"):
        Engine(model)


# --- isolation and failure -------------------------------------------------------------------------------


@pytest.mark.check
def test_a_step_that_fails_ends_its_own_requests_only(engines):
    model = ToyModel(slots=4, batch_sizes=(1,), delay=0.001)
    engine = engines(model)

    def fail(name, inputs):
        if int(inputs["tokens"][0, 0]) == 77 and int(inputs["start"][0]) == 0:
            raise ValueError("this prompt is poison")

    model.fail = fail
    good = [Listener() for _ in range(3)]
    tickets = [engine.submit([number, 1], GREEDY, listener) for number, listener in enumerate(good)]
    bad = ask(engine, [77, 1, 2])
    assert isinstance(bad.end.error, GenerationError) and "poison" in str(bad.end.error)
    for number, (ticket, listener) in enumerate(zip(tickets, good, strict=True)):
        assert ticket.wait(10)
        assert listener.tokens[0] == naive_generate([number, 1], max_tokens=12, ignore_eos=True)
    assert engine.state == "ready" and model.restarts == 0


def test_a_row_that_cannot_be_written_fails_alone_and_its_place_is_free_for_others(engines, monkeypatch):
    engine = engines(ToyModel(slots=3, batch_sizes=(4,), delay=0.001))
    for inputs in engine._inputs.values():
        put = inputs.put

        def refuse(place, row, sampler, put=put):
            if row.sequence.prompt[0] == 77 and row.sequence.output:
                raise OverflowError("no such number in float32")
            put(place, row, sampler)

        monkeypatch.setattr(inputs, "put", refuse)
    listeners = [Listener() for _ in range(3)]
    tickets = [engine.submit([first, 1], GREEDY, one) for first, one in zip((77, 2, 3), listeners, strict=True)]
    assert all(ticket.wait(10) for ticket in tickets)
    assert isinstance(listeners[0].end.error, GenerationError) and "no such number" in str(listeners[0].end.error)
    for first, listener in zip((2, 3), listeners[1:], strict=True):
        assert listener.tokens[0] == naive_generate([first, 1], max_tokens=12, ignore_eos=True)
    assert engine.state == "ready" and engine.model.restarts == 0


@pytest.mark.check
def test_a_prompt_whose_rows_cannot_all_be_written_fails_alone(engines, monkeypatch):
    """In the middle of those that it has in a decode step: what was written of it lies in a slot that is free then."""
    engine = engines(ToyModel(slots=3, batch_sizes=(1,), delay=0.001, prompt_rows=8), stall_ratio=1.0)
    for inputs in engine._inputs.values():
        put = inputs.put

        def refuse(place, row, sampler, put=put):
            if row.sequence.prompt[0] == 77 and row.start == 5:
                raise OverflowError("no such number in float32")
            put(place, row, sampler)

        monkeypatch.setattr(inputs, "put", refuse)
    stream, late, poor = Listener(), Listener(), Listener()
    long = GREEDY.replace(max_tokens=40)
    tickets = [engine.submit([2, 1], long, stream)]
    wait_until(lambda: stream.tokens[0])
    tickets += [engine.submit([77, *range(6)], GREEDY, poor), engine.submit([3] * 9, GREEDY, late)]
    assert all(ticket.wait(10) for ticket in tickets)
    assert isinstance(poor.end.error, GenerationError) and "no such number" in str(poor.end.error)
    assert stream.tokens[0] == naive_generate([2, 1], max_tokens=40, ignore_eos=True)
    assert late.tokens[0] == naive_generate([3] * 9, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("damage", ["nan", "range"])
def test_a_row_without_a_valid_token_fails_alone(engines, damage):
    model = ToyModel(slots=4, batch_sizes=(4,), delay=0.001)
    engine = engines(model)
    step = model._step

    def damaged(bucket, inputs):
        outputs = step(bucket, inputs)
        for row in range(inputs["tokens"].shape[0]):
            if int(inputs["block_table"][row, 0]) == 0 and int(inputs["start"][row]) > 4:
                if damage == "nan":
                    outputs["logprob"][row] = float("nan")
                else:
                    outputs["token"][row] = VOCAB
        return outputs

    model._step = damaged
    listeners = [Listener() for _ in range(4)]
    tickets = [engine.submit([number, 1], GREEDY, listener) for number, listener in enumerate(listeners)]
    assert all(ticket.wait(10) for ticket in tickets)
    assert isinstance(listeners[0].end.error, GenerationError)
    for number in (1, 2, 3):
        assert listeners[number].tokens[0] == naive_generate([number, 1], max_tokens=12, ignore_eos=True)


def test_a_listener_that_raises_loses_its_own_request_only(engines):
    engine = engines(ToyModel(delay=0.001))

    def broken(event):
        raise RuntimeError("client code")

    ticket = engine.submit([1, 2], GREEDY, broken)
    assert ask(engine, [3, 4]).tokens[0] == naive_generate([3, 4], max_tokens=12, ignore_eos=True)
    assert ticket.wait(5)
    assert engine.state == "ready"


@pytest.mark.check
def test_dead_ranks_fail_every_request_with_a_typed_error_and_come_back(engines):
    model = ToyModel(slots=2, delay=0.001)
    states = []
    engine = engines(model, on_state=states.append)
    armed = threading.Event()

    def die(name, inputs):
        if armed.is_set():
            armed.clear()
            model.dead = True
            raise RankDiedError("rank 1 died", 1)

    model.fail = die
    listeners = [Listener() for _ in range(5)]
    tickets = [engine.submit([number], GREEDY.replace(max_tokens=50), one) for number, one in enumerate(listeners)]
    wait_until(lambda: listeners[0].tokens[0])
    armed.set()
    assert all(ticket.wait(10) for ticket in tickets)
    for listener in listeners:
        assert isinstance(listener.end.error, EngineFailedError)
        assert isinstance(listener.end.error.__cause__, RankDiedError)
    wait_until(lambda: engine.state == "ready")
    assert model.restarts == 1 and engine.stats().restarts == 1
    assert states == ["ready", "recovering", "ready"]
    assert ask(engine, [5]).tokens[0] == naive_generate([5], max_tokens=12, ignore_eos=True)

    armed.set()  # a second failure soon after the first is one too many
    last = ask(engine, [6])
    assert isinstance(last.end.error, EngineFailedError)
    assert engine.wait_failed(5) and engine.state == "failed" and model.restarts == 1
    assert not engine.health().ready and "rank 1 died" in engine.health().error
    with pytest.raises(EngineUnavailableError) as caught:
        engine.submit([1], GREEDY, Listener())
    assert caught.value.state == "failed" and caught.value.retry_after is None


def test_a_restart_that_fails_leaves_the_engine_failed(engines):
    model = ToyModel()
    engine = engines(model)

    def no_restart():
        raise RankDiedError("it will not start", 0)

    model.restart = no_restart
    model.dead = True
    assert isinstance(ask(engine, [1]).end.error, EngineFailedError)
    assert engine.wait_failed(5)
    assert "will not start" in engine.health().error


def test_a_rank_that_dies_while_nothing_runs_is_noticed(engines):
    model = ToyModel()
    engine = engines(model, idle_probe=None)
    model.dead = True
    wait_until(lambda: model.restarts == 1 and engine.state == "ready", 5)


def test_an_idle_engine_makes_sure_that_its_ranks_still_answer(engines):
    model = ToyModel()
    calls = []
    engine = engines(model, idle_probe=0.05)
    model.fail = lambda name, inputs: calls.append((name, inputs["block_table"].tolist()))
    wait_until(lambda: len(calls) >= 2, 5)
    assert all(slots == [[model.slots]] for _, slots in calls), "a probe touches the scratch block alone"
    assert engine.stats().bucket_steps == {}


def test_a_warm_up_that_fails_is_an_error_of_start():
    model = ToyModel()

    def fail(name, inputs):
        raise RankDiedError("rank 0 died", 0)

    model.fail = fail
    engine = Engine(model)
    with pytest.raises(EngineUnavailableError, match="rank 0 died"):
        engine.start()
    assert engine.state == "failed"
    engine.close()


def test_a_step_that_hangs_makes_the_engine_not_ready(engines, monkeypatch):
    monkeypatch.setattr("nxd_server.engine.runner.OVERDUE_SECONDS", 0.05)
    model = ToyModel()
    engine = engines(model)
    gate = threading.Event()
    model.fail = lambda name, inputs: gate.wait(5)
    listener = Listener()
    ticket = engine.submit([1], GREEDY, listener)
    wait_until(lambda: not engine.health().ready, 5)
    assert "has been running" in engine.health().reason
    gate.set()
    assert ticket.wait(5)
    assert engine.health().ready and listener.end.reason == "length"


# --- life -----------------------------------------------------------------------------------------------


def test_every_graph_runs_before_the_engine_is_ready_and_no_slot_is_touched():
    model = ToyModel()
    seen, progress = [], []
    model.fail = lambda name, inputs: seen.append((name, set(inputs["block_table"].flatten().tolist())))
    engine = Engine(model)
    with pytest.raises(EngineUnavailableError, match="starting"):
        engine.submit([1], GREEDY, Listener())
    engine.start(on_progress=lambda done, total, name: progress.append((done, total)))
    names = [bucket.name for bucket in model.manifest.buckets]
    assert {name for name, _ in seen} == set(names)
    assert all(slots == {model.slots} for _, slots in seen)
    assert progress == [(done, len(names)) for done in range(len(names) + 1)]
    assert engine.health().ready
    engine.close()
    assert engine.state == "closed"
    with pytest.raises(EngineUnavailableError):
        engine.submit([1], GREEDY, Listener())


def test_draining_finishes_what_there_is_and_takes_nothing_new(engines):
    engine = engines(ToyModel(slots=1, delay=0.002))
    listeners = [Listener() for _ in range(4)]
    for number, listener in enumerate(listeners):
        engine.submit([number], GREEDY, listener)
    result = []
    drainer = threading.Thread(target=lambda: result.append(engine.drain(20)))
    drainer.start()
    wait_until(lambda: engine.state == "draining")
    with pytest.raises(EngineUnavailableError, match="draining"):
        engine.submit([1], GREEDY, Listener())
    drainer.join(20)
    assert result == [True]
    for number, listener in enumerate(listeners):
        assert listener.tokens[0] == naive_generate([number], max_tokens=12, ignore_eos=True)


def test_a_drain_that_takes_too_long_ends_and_closing_fails_the_rest():
    engine = Engine(ToyModel(max_len=4096, delay=0.002))
    engine.start()
    listener = Listener()
    engine.submit([1], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True), listener)
    assert engine.drain(0.05) is False
    engine.close()
    assert isinstance(listener.end.error, EngineUnavailableError) and engine.state == "closed"


def test_steps_are_counted_by_bucket_with_their_padding(engines):
    engine = engines(ToyModel(slots=1, batch_sizes=(2,)))
    ask(engine, [1] * 10, GREEDY.replace(max_tokens=4))
    stats = engine.stats()
    assert stats.bucket_steps == {"prefill_s16": 1, "decode_b2": 3}
    assert stats.useful_tokens == {"prefill_s16": 10, "decode_b2": 3}
    assert stats.padding_tokens == {"prefill_s16": 6, "decode_b2": 3}
    assert (stats.prompt_tokens, stats.generated_tokens) == (10, 4)
    assert set(stats.step_seconds) == {"decode_b2", "prefill_s8", "prefill_s16"}


def test_a_burst_of_prompts_does_not_stall_a_running_stream(engines):
    model = ToyModel(slots=8, max_len=512, batch_sizes=(8,), prompt_buckets=(16,), delay=0.001)
    engine = engines(model)
    listener = Listener()
    stream = engine.submit([1], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True), listener)
    wait_until(lambda: listener.tokens[0])
    tickets = [engine.submit([2] * 160, GREEDY, Listener()) for _ in range(7)]
    assert all(ticket.wait(20) for ticket in tickets) and stream.wait(20)
    names = [name for name, _ in model.steps]
    first, last = names.index("decode_b8"), len(names) - names[::-1].index("prefill_s16")
    assert "prefill_s16 prefill_s16" not in " ".join(names[first:last])


def test_events_carry_times_in_order(engines):
    timings = ask(engines(), [1, 2, 3]).end.timings
    assert timings.arrived <= timings.admitted <= timings.first_token <= timings.finished


def test_a_step_is_begun_while_the_one_before_it_runs(engines):
    """Where its tokens may be unknown. An answer whose length is known takes no step more; what a step gave for a
    choice that had stopped by then is nobody's."""
    model = ToyModel(ahead=True)
    engine = engines(model)
    assert ask(engine, [1, 2, 3]).tokens[0] == naive_generate([1, 2, 3], max_tokens=12, ignore_eos=True)
    assert model.most_begun == 2 and len(model.steps) == 12
    until_stopped = naive_generate([4, 2], max_tokens=50)
    assert ask(engine, [4, 2], SamplingParams(max_tokens=50, temperature=0)).tokens[0] == until_stopped
    wait_until(lambda: len(model.steps) == 12 + len(until_stopped) + 1)
    stats = engine.stats()
    assert until_stopped[-1] in EOS and stats.generated_tokens == 12 + len(until_stopped)
    wait_until(lambda: sum(engine.stats().bucket_steps.values()) == len(model.steps))
    assert sum(engine.stats().useful_tokens.values()) == 3 + 11 + 2 + len(until_stopped) - 1
    for bucket in (other := ToyModel(ahead=True)).buckets:
        bucket.inputs[0].minimum = 0  # no token may be unknown
    assert ask(engines(other), [1, 2, 3]).tokens[0] == naive_generate([1, 2, 3], max_tokens=12, ignore_eos=True)
    assert other.most_begun == 1


def test_the_tensors_of_a_step_have_the_manifests_dtypes():
    model = ToyModel(ahead=False)
    inputs = Engine(model)._inputs["decode_b4"].tensors
    for spec in model.manifest.bucket("decode_b4").inputs:
        assert inputs[spec.name].dtype == spec.torch_dtype and list(inputs[spec.name].shape) == spec.shape
    assert torch.equal(inputs["top_p"], torch.ones(4)) and torch.equal(inputs["repetition_penalty"], torch.ones(4))
