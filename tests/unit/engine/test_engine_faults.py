"""A step, a row, a listener or a rank that fails takes with it what it must, and no more."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from nxd_infer.errors import RankDiedError
from nxd_server.engine import Engine
from nxd_server.errors import EngineFailedError, EngineUnavailableError, GenerationError
from tests.support.engine.asking import BOTH_WAYS, GREEDY, ask, ask_all, held
from tests.support.engine.toy_model import VOCAB, Listener, ToyModel, naive_generate
from tests.support.processes import wait_until


def poisoned(engine, monkeypatch):
    def fail(name, inputs):
        if int(inputs["tokens"][0, 0]) == 77 and int(inputs["start"][0]) == 0:
            raise ValueError("this prompt is poison")

    engine.model.fail = fail


def unwritable(engine, monkeypatch):
    for inputs in engine._inputs.values():

        def refuse(place, row, put=inputs.put):
            if row.sequence.prompt[0] == 77 and row.sequence.output:
                raise OverflowError("no such number in float32")
            put(place, row)

        monkeypatch.setattr(inputs, "put", refuse)


def spoilt(output, value):
    def damage(engine, monkeypatch):
        step = engine.model._step

        def damaged(bucket, inputs):
            outputs = step(bucket, inputs)
            outputs[output][(inputs["block_table"][:, 0] == 0) & (inputs["start"] > 4)] = value
            return outputs

        engine.model._step = damaged

    return damage


@BOTH_WAYS
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (poisoned, "poison"),
        (unwritable, "no such number"),
        (spoilt("logprob", float("nan")), "no valid"),
        (spoilt("token", VOCAB), "no valid"),
    ],
)
def test_what_goes_wrong_with_one_row_ends_its_own_request_only(engines, monkeypatch, damage, words):
    engine = engines(ToyModel(slots=4, batch_sizes=(1,) if damage is poisoned else (4,), delay=0.001))
    damage(engine, monkeypatch)
    bad, *good = ask_all(engine, [[77, 1], [1, 1], [2, 1], [3, 1]])
    assert isinstance(bad.end.error, GenerationError) and words in str(bad.end.error)
    for number, listener in enumerate(good, 1):
        assert listener.tokens[0] == naive_generate([number, 1], max_tokens=12, ignore_eos=True)
    assert engine.state == "ready" and engine.model.restarts == 0


def test_a_listener_that_raises_loses_its_own_request_only(engines):
    engine = engines(ToyModel(delay=0.001))
    ticket = engine.submit([1, 2], GREEDY, Mock(side_effect=RuntimeError("client code")))
    assert ask(engine, [3, 4]).tokens[0] == naive_generate([3, 4], max_tokens=12, ignore_eos=True)
    assert ticket.wait(60)
    assert engine.state == "ready"


@BOTH_WAYS
def test_dead_ranks_fail_every_request_with_a_typed_error_and_come_back(engines):
    model = ToyModel(slots=2, delay=0.001)
    states = []
    engine = engines(model, on_state=states.append)
    armed, listeners = threading.Event(), [Listener() for _ in range(5)]

    def die(name, inputs):
        if armed.is_set() and listeners[0].tokens[0]:
            armed.clear()
            model.dead = True
            raise RankDiedError("rank 1 died", 1)

    model.fail = die
    with held(model):
        tickets = [engine.submit([number], GREEDY, one) for number, one in enumerate(listeners)]
        armed.set()
    assert all(ticket.wait(60) for ticket in tickets)
    for listener in listeners:
        assert isinstance(listener.end.error, EngineFailedError)
        assert isinstance(listener.end.error.__cause__, RankDiedError)
    wait_until(lambda: states == ["ready", "recovering", "ready"])
    assert engine.state == "ready" and model.restarts == 1 and engine.stats().restarts == 1
    assert ask(engine, [5]).tokens[0] == naive_generate([5], max_tokens=12, ignore_eos=True)

    armed.set()  # a second failure soon after the first is one too many
    last = ask(engine, [6])
    assert isinstance(last.end.error, EngineFailedError)
    assert engine.wait_failed(60) and engine.state == "failed" and model.restarts == 1
    assert not engine.health().ready and "rank 1 died" in engine.health().error
    with pytest.raises(EngineUnavailableError) as caught:
        engine.submit([1], GREEDY, Listener())
    assert caught.value.state == "failed" and caught.value.retry_after is None


def test_a_restart_that_fails_leaves_the_engine_failed(engines):
    model = ToyModel()
    engine = engines(model)
    model.restart = Mock(side_effect=RankDiedError("it will not start", 0))
    listener = Listener()
    with held(model):
        ticket = engine.submit([1], GREEDY, listener)
        model.dead = True
    assert ticket.wait(60) and isinstance(listener.end.error, EngineFailedError)
    assert engine.wait_failed(60)
    assert "will not start" in engine.health().error and "will not start" in engine.verdict


def test_a_rank_that_dies_while_nothing_runs_is_noticed(engines):
    model = ToyModel()
    engine = engines(model, idle_probe=None)
    model.dead = True
    wait_until(lambda: model.restarts == 1 and engine.state == "ready")


def test_an_idle_engine_makes_sure_that_its_ranks_still_answer(engines):
    model = ToyModel()
    calls = []
    engine = engines(model, idle_probe=0.05)
    model.fail = lambda name, inputs: calls.append((name, inputs["block_table"].tolist()))
    wait_until(lambda: len(calls) >= 2)
    assert all(slots == [[model.slots]] for _, slots in calls), "a probe touches the scratch block alone"
    assert engine.stats().bucket_steps == {}


def test_a_warm_up_that_fails_is_an_error_of_start(caplog):
    model = ToyModel()
    model.fail = Mock(side_effect=RankDiedError("rank 0 died", 0))
    engine = Engine(model)
    with pytest.raises(EngineUnavailableError, match="rank 0 died"):
        engine.start()
    assert engine.state == "failed" and "Traceback" not in caplog.text
    engine.close()


def test_a_step_that_hangs_makes_the_engine_not_ready(engines, monkeypatch):
    monkeypatch.setattr("nxd_server.engine.step_runner.OVERDUE_SECONDS", 0.05)
    model = ToyModel()
    engine = engines(model, idle_probe=None)
    gate = threading.Event()
    model.fail = lambda name, inputs: gate.wait(60)
    listener = Listener()
    ticket = engine.submit([1], GREEDY, listener)
    wait_until(lambda: not engine.health().ready)
    assert "has been running" in engine.health().reason
    model.dead = True  # and its ranks are being ended, which takes time
    assert engine.health().state == "ready" and engine.health().reason == "the ranks failed: the toy is dead"
    model.dead = False
    gate.set()
    assert ticket.wait(60)
    assert engine.health().ready and listener.end.reason == "length"
