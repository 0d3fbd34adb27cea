"""The engine against the naive generator: the same tokens under any traffic; its life from start to drain."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nxd_server.engine import Engine, SamplingParams
from nxd_server.errors import EngineUnavailableError
from tests.support.engine.asking import BOTH_WAYS, GREEDY, SYSTEM, ask, held
from tests.support.engine.toy_model import EOS, VOCAB, Listener, ToyModel, naive_generate
from tests.support.processes import wait_until


@BOTH_WAYS
@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 52, 63, 64])
def test_greedy_tokens_equal_the_naive_ones_for_every_kind_of_length(engines, length):
    prompt = [(7 * place) % VOCAB for place in range(length)]
    room = max(1, 64 - length)
    result = ask(engines(), prompt, GREEDY.replace(max_tokens=min(12, room)))
    assert result.tokens[0] == naive_generate(prompt, max_tokens=12, ignore_eos=True, max_len=64)
    assert result.end.reason == "length"
    assert result.end.usage.prompt_tokens == length
    assert result.end.usage.completion_tokens == len(result.tokens[0]) == min(12, room)
    timings = result.end.timings
    assert timings.arrived <= timings.admitted <= timings.first_token <= timings.finished


@BOTH_WAYS
@pytest.mark.parametrize(("seed", "prompt_rows"), [(0, 0), (1, 5)])
def test_random_traffic_with_cancellations_gives_everyone_their_own_tokens(engines, seed, prompt_rows):
    model = ToyModel(slots=3, max_len=48, prompt_buckets=(4, 8), delay=0.0002, prompt_rows=prompt_rows)
    engine = engines(model, max_queued_requests=10**6)
    together = threading.Barrier(9)  # all slots are taken from the first step on

    def client(number):
        rng = random.Random(seed * 100 + number)
        for turn in range(5):
            shared = SYSTEM[: rng.choice([0, 18, 20])]
            prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 40 - len(shared))))]
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
            if turn == 0:
                together.wait(60)
            cancelled = rng.random() < 0.3
            if cancelled:
                time.sleep(rng.random() * 0.01)
                ticket.cancel()
            assert ticket.wait(60)
            if listener.end.reason == "cancelled":
                assert cancelled
                expected = expected[: len(listener.tokens[0])]
            assert listener.tokens[0] == expected

    with ThreadPoolExecutor(8) as pool:
        with held(model):
            clients = pool.map(client, range(8))
            together.wait(60)
        list(clients)
    assert any(len(set(slots)) < len(slots) for _, slots in model.steps) == (prompt_rows > 0)
    stats = engine.stats()
    assert stats.reused_tokens > 0 and sum(stats.finished.values()) == stats.submitted == 40
    assert stats.running == stats.waiting == stats.waiting_tokens == 0 and stats.kv_usage == 0


def test_without_a_seed_two_answers_differ(engines):
    engine = engines()
    params = SamplingParams(max_tokens=20, temperature=1.5, ignore_eos=True)
    assert ask(engine, [1], params).tokens != ask(engine, [1], params).tokens


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


def test_steps_are_counted_by_bucket_with_their_padding(engines):
    engine = engines(ToyModel(slots=1, batch_sizes=(2,)))
    ask(engine, [1] * 10, GREEDY.replace(max_tokens=4))
    stats = engine.stats()
    assert stats.bucket_steps == {"prefill_s16": 1, "decode_b2": 3}
    assert stats.useful_tokens == {"prefill_s16": 10, "decode_b2": 3}
    assert stats.padding_tokens == {"prefill_s16": 6, "decode_b2": 3}
    assert (stats.prompt_tokens, stats.generated_tokens) == (10, 4)
    assert set(stats.step_seconds) == {"decode_b2", "prefill_s8", "prefill_s16"}


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
