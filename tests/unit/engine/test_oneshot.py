"""Dynamic batching: everyone gets their own rows, whatever shares the step; no request harms another."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

from nxd_infer.errors import BucketError, InputMismatchError, InputRangeError, ModelConfigError, RankFailedError
from nxd_server.engine import OneShotEngine, TextEncoder
from nxd_server.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    GenerationError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from nxd_server.llm import LLM
from tests.support.engine.asking import held
from tests.support.engine.toy_oneshot import ToyOneShot, expected
from tests.support.processes import wait_until


def request(rows, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 1000, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def check(inputs, outputs):
    assert torch.equal(outputs["echo"], inputs["input_ids"])
    assert torch.equal(outputs["embedding"], torch.stack([expected(row) for row in inputs["input_ids"]]))


def test_random_traffic_from_many_threads_gives_everyone_their_own_rows(oneshot_engines):
    engine = oneshot_engines(ToyOneShot(delay=0.0005), max_queued_requests=10**6)
    together = threading.Barrier(9)

    def client(number):
        rng = random.Random(number)
        for turn in range(12):
            inputs = request(rng.randint(1, 4), rng.randint(1, 16), seed=number * 1000 + turn)
            future = engine.submit(inputs)
            if turn == 0:
                together.wait(60)
            if rng.random() < 0.2 and future.cancel():
                continue
            check(inputs, future.result(60))

    with ThreadPoolExecutor(8) as pool:
        with blocked(engine):
            clients = pool.map(client, range(8))
            together.wait(60)  # so that some wait together
        list(clients)
    assert engine.drain(60)  # the last one may have been cancelled a moment ago
    stats = engine.stats()
    assert sum(stats.finished.values()) == stats.submitted == 97
    assert sum(stats.bucket_steps.values()) < 97 - stats.finished.get("cancelled", 0), "nothing was batched"


@contextlib.contextmanager
def blocked(engine):
    """A step is taken until the end of this block, so that what follows queues up."""
    with held(engine.model):
        first = engine.submit(request(4, 16))
        wait_until(lambda: engine.health().step_running is not None)
        yield first


def test_waiting_requests_share_steps_and_the_oldest_decides_the_length(oneshot_engines):
    engine = oneshot_engines()
    inputs = [request(1, 5, seed) for seed in range(8)] + [request(1, length) for length in (8, 9, 3, 16)]
    with blocked(engine):
        futures = [engine.submit(one) for one in inputs]
    for one, future in zip(inputs, futures, strict=True):
        check(one, future.result(60))
    steps = engine.model.calls[1:]
    assert steps[:2] == [("b4_s8", 4), ("b4_s8", 4)] and [name[-3:] for name, _ in steps[2:]] == ["_s8", "s16"]


def test_the_batch_size_with_the_most_rows_per_second_runs(oneshot_engines):
    for cheap, dear in (("b1_s8", "b4_s8"), ("b4_s8", "b1_s8")):
        engine = oneshot_engines(ToyOneShot(batches=(1, 4)), max_delay_ms=0, costs={cheap: 0.001, dear: 1.0})
        engine.submit(request(1, 8)).result(60)
        assert engine.model.calls[-1][0] == cheap


def test_a_request_waits_for_company_no_longer_than_the_delay(oneshot_engines):
    for_ever, soon = oneshot_engines(max_delay_ms=1e9), oneshot_engines(max_delay_ms=50)
    first = for_ever.submit(request(1, 4))
    alone = soon.submit(request(1, 4))
    alone.result(60)
    assert soon.model.calls == [("b1_s8", 1)] and not first.done()
    second = for_ever.submit(request(3, 4))  # together they are as many as there may be
    first.result(60), second.result(60)
    for_ever.submit(request(4, 4)).result(60)
    assert for_ever.model.calls == [("b4_s8", 4)] * 2


def test_a_model_that_does_not_declare_its_rows_independent_never_shares_a_step(oneshot_engines):
    uncut = ToyOneShot()
    uncut.manifest.buckets[0].outputs[0].cut = {}
    assert oneshot_engines().batches and not oneshot_engines(uncut).batches
    engine = oneshot_engines(ToyOneShot(batches=(1,), pad_batch=False))
    assert not engine.batches
    inputs = [request(1, length) for length in (3, 8, 12, 12)]
    for one, future in zip(inputs, [engine.submit(one) for one in inputs], strict=True):
        check(one, future.result(60))
    assert engine.model.calls == [("b1_s8", 1), ("b1_s8", 1), ("b1_s16", 1), ("b1_s16", 1)]
    with pytest.raises(BucketError):
        engine.submit(request(2, 8))


def test_a_model_with_its_own_routing_is_called_as_its_user_would(oneshot_engines):
    engine = oneshot_engines(ToyOneShot(requires=["bucket-kernel"]))
    inputs = request(3, 5)
    assert torch.equal(engine.submit(inputs).result(60)["embedding"], inputs["input_ids"].double().sum(1))
    assert engine.model.calls == [("forward", 3)] and not engine.batches


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        (request(1, 17), BucketError),
        (request(5, 8), BucketError),
        ({"input_ids": request(1, 8)["input_ids"]}, InputMismatchError),
        (request(1, 8) | {"more": torch.zeros(1)}, InputMismatchError),
        ({name: tensor.int() for name, tensor in request(1, 8).items()}, InputMismatchError),
        (request(2, 8) | {"attention_mask": torch.ones(1, 8, dtype=torch.int64)}, InputMismatchError),
        (request(1, 8) | {"input_ids": torch.full((1, 8), 1000)}, InputRangeError),
    ],
)
def test_what_does_not_fit_is_refused_at_once(oneshot_engines, inputs, error):
    engine = oneshot_engines()
    with pytest.raises(error):
        engine.submit(inputs)
    assert engine.stats().rejected == {"invalid": 1} and engine.stats().submitted == 0


@pytest.mark.parametrize("kills", [False, True])
def test_one_bad_request_in_a_shared_step_harms_no_other(oneshot_engines, kills):
    """Not even where it kills the ranks, and more often than machines may fail."""
    engine = oneshot_engines(max_delay_ms=1e9)  # four rows are a full batch

    def fail(name, given):
        if (given["input_ids"] == 666).any():
            engine.model.dead = kills
            raise RankFailedError("rank 0: the beast", 0) if kills else ValueError("the beast")

    engine.submit(request(4, 3)).result(60)
    engine.model.fail = fail
    for _ in range(3):
        inputs = [request(1, 5, seed) for seed in range(4)]
        inputs[1]["input_ids"][0, 0] = 666
        futures = [engine.submit(one) for one in inputs]
        for number in (0, 2, 3):
            check(inputs[number], futures[number].result(60))
        with pytest.raises(GenerationError, match="the beast"):
            futures[1].result(60)
        wait_until(lambda: engine.state == "ready")


def test_deadlines_cancellation_and_queue_limits(oneshot_engines):
    engine = oneshot_engines(max_queued_requests=2)
    with blocked(engine) as first:
        late = engine.submit(request(1, 3), timeout=0.05)
        gone = engine.submit(request(1, 3))
        more = [engine.submit(request(1, 3)) for _ in range(3)]  # one step's worth besides the two that may queue
        with pytest.raises(QueueFullError) as caught:
            engine.submit(request(1, 3))
        assert caught.value.retry_after >= 1
        with pytest.raises(QueueFullError):
            engine.check_room(1, continuing=True)
        assert gone.cancel()
        time.sleep(0.06)  # never shorter, so its time is over
    with pytest.raises(DeadlineExceededError):
        late.result(60)
    with pytest.raises(CancelledError):
        gone.result(60)
    for future in (first, *more):
        future.result(60)
    wait_until(lambda: engine.stats().finished == {"done": 4, "deadline": 1, "cancelled": 1})


def test_draining_finishes_what_waits_and_closing_fails_the_rest(oneshot_engines):
    engine = oneshot_engines(ToyOneShot(delay=0.01), max_delay_ms=1000)
    futures = [engine.submit(request(1, 16)) for _ in range(6)]
    assert engine.drain(60)
    assert all(future.done() for future in futures)
    with pytest.raises(EngineUnavailableError, match="draining"):
        engine.submit(request(1, 3))
    other = oneshot_engines(max_delay_ms=1e9)
    waiting = other.submit(request(1, 3))
    other.close()
    with pytest.raises(EngineUnavailableError):
        waiting.result(60)


def test_a_generation_artifact_is_refused():
    with pytest.raises(ModelConfigError, match="Engine"):
        OneShotEngine(ToyOneShot(metadata={"task": "generate"}))


@pytest.fixture
def encoder(oneshot_engines):
    from tokenizers import Tokenizer as Raw
    from tokenizers import models, pre_tokenizers, processors

    from nxd_server.text.tokenizer import Tokenizer

    words = ["[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d"]
    raw = Raw(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return TextEncoder(oneshot_engines(), Tokenizer(raw))


def submitted(encoder, text, field="input"):
    return encoder.submit(encoder.tokens(text, field=field), field=field)


def test_texts_and_token_ids_become_vectors_with_their_token_counts(encoder):
    result = submitted(encoder, "a b c").result(60)
    assert result.tokens == 5 and torch.equal(result.values, expected(torch.tensor([1, 3, 4, 5, 2])))
    assert torch.equal(submitted(encoder, [1, 3, 4, 5, 2]).result(60).values, result.values)
    assert submitted(encoder, ("a", "b")).result(60).tokens == 5


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a " * 15, PromptTooLongError),
        ([], RequestError),
        ([1000], RequestError),
        (["a"], RequestError),
        ("\ud800", RequestError),
    ],
)
def test_a_text_that_cannot_be_encoded_is_refused_by_field(encoder, text, error):
    with pytest.raises(error) as caught:
        submitted(encoder, text, "input[3]")
    assert caught.value.field == "input[3]"


def test_a_call_that_is_refused_midway_leaves_nothing_behind(encoder):
    llm = LLM.__new__(LLM)
    llm.task, llm.encoder = "embed", encoder
    with blocked(encoder.engine), pytest.raises(PromptTooLongError):
        llm.embed([*["a b"] * 20, "a " * 15])
    assert encoder.engine.drain(60)
    assert encoder.engine.stats().finished == {"done": 1, "cancelled": 20}
