"""New weights under traffic: every request is answered by one version, and none is lost, whatever becomes of a swap."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch

from nxd_infer.errors import RankFailedError, WeightSchemaError
from nxd_server import LLM
from nxd_server.engine import SamplingParams
from nxd_server.engine.admission import WholeRequest
from nxd_server.errors import EngineUnavailableError, WeightsBusyError
from tests.support.engine.asking import BOTH_WAYS
from tests.support.engine.toy_model import VOCAB, Listener, ToyModel, ToyWeights, naive_generate
from tests.support.engine.toy_oneshot import ToyOneShot, expected
from tests.support.processes import wait_until

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def swapping(engine, weights, **options):
    """A swap in a thread."""
    return ThreadPoolExecutor(1).submit(engine.update_weights, weights, **options)


@BOTH_WAYS
def test_every_request_is_of_one_version_and_none_is_lost(engines):
    engine = engines(ToyModel(slots=4), max_queued_requests=10_000)
    draw = random.Random(0)
    asked, stop = [], threading.Event()

    def client(seed):
        own = random.Random(seed)
        while not stop.is_set():
            with WholeRequest() as whole:
                for _ in range(own.choice([1, 1, 3])):
                    params = GREEDY.replace(n=own.choice([1, 2, 5]))
                    prompt = [own.randrange(7, VOCAB) for _ in range(own.randint(1, 30))]
                    listener = Listener(params.n)
                    asked.append((engine.submit(prompt, params, listener, whole=whole), listener))
            time.sleep(own.random() * 0.02)

    versions = []
    with ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as at_end:
        at_end.callback(stop.set)
        clients = pool.map(client, range(3))
        for number in range(1, 4):
            enough = sum(engine.stats().finished.values()) + draw.randint(1, 15)
            wait_until(lambda enough=enough: sum(engine.stats().finished.values()) >= enough)
            versions.append(engine.update_weights(number, timeout=60))
    list(clients)
    for ticket, listener in asked:
        assert ticket.wait(60)
        prompt, version = ticket.choices[0].prompt, ticket.whole.version
        want = naive_generate(prompt, max_tokens=6, ignore_eos=True, weights=version)
        assert listener.tokens == [want] * len(ticket.choices)
        assert all(end.reason == "length" for end in listener.ends)
    assert versions == [1, 2, 3] and engine.model.weights == 3
    assert len({ticket.whole.version for ticket, _ in asked}) > 1


def test_a_request_that_has_begun_is_finished_on_the_old_weights(engines):
    model = ToyModel(slots=1, delay=0.01)
    engine = engines(model)
    first, second, third = Listener(), Listener(), Listener()
    with WholeRequest() as whole:
        engine.submit([7, 8], GREEDY.replace(max_tokens=30), first, whole=whole)
        wait_until(lambda: first.tokens[0])
        swap = swapping(engine, 1)
        wait_until(lambda: engine.gate.closed)
        later = engine.submit([9], GREEDY, third)
        assert engine.submit([7, 9], GREEDY, second, whole=whole).wait(60)  # passes the one that came before it
        assert not third.tokens[0] and model.weights == 0
        with pytest.raises(WeightsBusyError, match="another change"):
            engine.update_weights(2)
        time.sleep(0.05)
        assert engine.gate.closed  # a third prompt may still come
    assert swap.result(60) == 1 and later.wait(60)
    assert first.tokens[0] == naive_generate([7, 8], max_tokens=30, ignore_eos=True)
    assert second.tokens[0] == naive_generate([7, 9], max_tokens=6, ignore_eos=True)
    assert third.tokens[0] == naive_generate([9], max_tokens=6, ignore_eos=True, weights=1)
    assert (whole.version, later.whole.version) == (0, 1)


def test_one_call_of_an_llm_is_of_one_version(engines):
    llm = LLM.__new__(LLM)  # around the toy, which is no artifact on disk
    llm.engine = engine = engines(ToyModel(slots=1, delay=0.005))
    prompts = [[7 + number, 8] for number in range(6)]
    call = ThreadPoolExecutor(1).submit(llm.generate, prompts, GREEDY)
    wait_until(lambda: engine.stats().generated_tokens)
    assert llm.update_weights(1) == 1
    wanted = [naive_generate(prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
    assert [answer.outputs[0].token_ids for answer in call.result(60)] == wanted
    (later,) = llm.generate(prompts[0], GREEDY)
    assert later.outputs[0].token_ids == naive_generate(prompts[0], max_tokens=6, ignore_eos=True, weights=1)


def test_requests_that_take_too_long_keep_the_old_weights(engines):
    engine = engines(ToyModel(slots=1))
    running, waiting = Listener(), Listener()
    with WholeRequest() as whole:  # which may always have one more prompt
        assert engine.submit([7], GREEDY, running, whole=whole).wait(60)
        swap = swapping(engine, 1, timeout=0.3)
        wait_until(lambda: engine.gate.closed or swap.done())
        ticket = engine.submit([8], GREEDY, waiting)  # mostly while the swap waits
        with pytest.raises(WeightsBusyError, match="1 requests"):
            swap.result(60)
        assert ticket.wait(60)
    assert engine.model.weights == 0 and ticket.whole.version == 0
    assert waiting.tokens[0] == naive_generate([8], max_tokens=6, ignore_eos=True)
    assert engine.update_weights(3) == 1  # nothing is left behind


def test_weights_that_are_refused_change_nothing(engines):
    engine = engines()
    with pytest.raises(WeightSchemaError):
        engine.update_weights("no number")
    engine.model.fail_update = Mock(side_effect=WeightSchemaError("a rank refused the new weights"))
    with pytest.raises(WeightSchemaError, match="a rank refused"):
        engine.update_weights(1)
    assert engine.model.weights == engine.gate.version == engine.model.restarts == 0
    engine.model.fail_update = lambda: None
    assert [engine.update_weights(number) for number in (5, 6)] == [1, 2]  # an idle engine swaps at once


def test_ranks_that_fail_over_new_weights_start_again_with_the_old_and_requests_wait(engines):
    model = ToyModel(slots=1, delay=0.01)
    engine = engines(model)
    model.fail_update = Mock(side_effect=RankFailedError("new weights replaced only some of the old ones", 0))
    running, waiting = Listener(), Listener()
    with WholeRequest() as whole:
        engine.submit([7], GREEDY, running, whole=whole)
        wait_until(lambda: running.tokens[0])
        swap = swapping(engine, 1)
        wait_until(lambda: engine.gate.closed)
        ticket = engine.submit([8], GREEDY, waiting)
    assert isinstance(swap.exception(60), RankFailedError)
    assert ticket.wait(60) and waiting.tokens[0] == naive_generate([8], max_tokens=6, ignore_eos=True)
    assert model.restarts == 1 and engine.gate.version == 0
    wait_until(lambda: engine.state == "ready")
    model.fail_update = lambda: None
    assert engine.update_weights(5) == 1


def test_a_change_whose_caller_was_interrupted_is_never_made(engines):
    engine = engines()
    cut = []
    engine.model.cut_weights = lambda weights, tag: cut.append(ToyWeights(weights)) or cut[-1]

    def interrupt():
        wait_until(lambda: engine.gate.closed)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with WholeRequest() as whole:  # begun, and open: no change may begin
        assert engine.submit([7], GREEDY, Listener(), whole=whole).wait(60)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.update_weights(1, timeout=60)
        thread.join(60)
        assert not engine.gate.closed and cut[0].closed
    listener = Listener()
    assert engine.submit([7], GREEDY, listener).wait(60)  # after the moment at which it would have been made
    assert listener.tokens[0] == naive_generate([7], max_tokens=6, ignore_eos=True)
    assert engine.model.weights == 0 and engine.update_weights(2) == 1


@pytest.mark.parametrize("end", ["draining", "closed"])
def test_weights_that_were_cut_when_the_engine_ended_are_told_so_at_once(engines, end):
    engine = engines()
    cut, go, made = threading.Event(), threading.Event(), []

    def cut_weights(weights, tag):
        made.append(ToyWeights(weights))
        cut.set()
        go.wait(60)
        return made[0]

    engine.model.cut_weights = cut_weights
    swap = swapping(engine, 1, timeout=float("inf"))  # if it waited, it would do so for ever
    assert cut.wait(60)
    assert engine.drain(60) if end == "draining" else engine.close() is None
    go.set()
    with pytest.raises(EngineUnavailableError) as told:
        swap.result(60)
    assert told.value.state == end
    assert made[0].closed and engine.model.weights == 0


def test_texts_in_waves_are_of_one_version(oneshot_engines):
    """The second wave of a request passes what waits for the swap, and a full queue does not stop it."""
    engine = oneshot_engines(model := ToyOneShot(batches=(1,), delay=0.01), max_queued_requests=1)
    row = torch.tensor([[1, 2, 3]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    with WholeRequest() as whole:
        early = engine.submit(inputs, whole=whole).result(60)
        swap = swapping(engine, 1)
        wait_until(lambda: engine.gate.closed)
        others = [engine.submit(inputs) for _ in range(2)]  # the slot and the queue are full now
        late = engine.submit(inputs, whole=whole, continuing=True).result(60)
        assert model.weights == 0 and not any(other.done() for other in others)
    assert swap.result(60) == 1 and whole.version == 0
    want = expected(row[0])
    for got, version in [(early, 0), (late, 0), *((other.result(60), 1) for other in others)]:
        assert torch.equal(got["embedding"][0], want + version)
    cancelled = WholeRequest()
    engine.submit(inputs, whole=cancelled).cancel()
    cancelled.close()
    assert engine.update_weights(7, timeout=60) == 2  # what was cancelled holds up nothing
