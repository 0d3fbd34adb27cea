"""Which failures use up the restarts, and whom they cost their answer: each rule of the engines by itself."""

from __future__ import annotations

import errno
import gc
import os
import time
import weakref
from unittest.mock import Mock

import pytest
import torch

from nxd_infer.errors import ModelClosedError, RankDiedError, RankFailedError, RankStartError
from nxd_server.engine.rank_restarts import RankRestarts
from nxd_server.errors import EngineFailedError, GenerationError, forget_frames, summary
from nxd_server.http.error_responses import as_api_error
from tests.support.engine.asking import held
from tests.support.engine.toy_oneshot import ToyOneShot, expected
from tests.support.processes import wait_until

POISON, HARMLESS = 666, 7
"""First ids of a request: with the first the graph raises in the ranks, as a wrong input makes it do."""
REMOTE = "Traceback (most recent call last): secret.py"
RAISED = f"rank 0: index out of range\n--- traceback of rank 0 ---\n{REMOTE}"


class Fragile(ToyOneShot):
    """Loses its ranks when a request begins with POISON, and when it is told to (``die``)."""

    def __init__(self):
        super().__init__(batches=(4,))
        self.die = False
        self.batches: list[list[int]] = []
        """First ids of the live rows of every step, in order."""
        self.fail = self._lose_ranks

    def _lose_ranks(self, name, inputs):
        live = inputs["input_ids"][inputs["attention_mask"].sum(1) > 0]
        if len(live):  # and not the warm-up
            self.batches.append(live[:, 0].tolist())
        if self.die:
            self.die, self.dead = False, True
            raise RankDiedError("rank 0 died", 0)
        if (inputs["input_ids"] == POISON).any():
            self.dead = True
            raise RankFailedError(RAISED, 0, REMOTE)


@pytest.fixture
def engines(oneshot_engines):
    return lambda **options: oneshot_engines(Fragile(), **options)


def request(first):
    ids = torch.tensor([[first, 2, 3]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def settled(engine):
    wait_until(lambda: engine.state != "recovering")
    return engine.state


def works(engine):
    given = request(HARMLESS)["input_ids"][0]
    answer = engine.submit(request(HARMLESS)).result(60)["embedding"][0]
    return torch.equal(answer, expected(given))


def poison(engine):
    with pytest.raises((GenerationError, EngineFailedError), match="index out of range") as caught:
        engine.submit(request(POISON)).result(60)
    return settled(engine), type(caught.value)


def die(engine):
    engine.model.die = True
    with pytest.raises(EngineFailedError, match="rank 0 died"):
        engine.submit(request(HARMLESS)).result(60)
    return settled(engine)


def test_bad_requests_use_up_no_restart_and_a_rank_that_died_does(engines):
    """A step that worked before them is repeated after each restart: the ranks are well."""
    engine = engines(restart_limit=1)
    assert works(engine)
    engine.model.batches.clear()
    assert [poison(engine) for _ in range(5)] == [("ready", GenerationError)] * 5
    assert engine.model.batches == [[POISON], [HARMLESS]] * 5
    assert engine.model.restarts == engine.stats().restarts == 5
    assert works(engine)
    assert die(engine) == "ready", "the restarts for bad requests were counted against the machine"
    assert works(engine)
    assert die(engine) == "failed"


def test_a_graph_that_has_never_worked_is_the_machines_fault(engines):
    """Warm-up does not count as work: it runs on padding, which every graph survives."""
    engine = engines(restart_limit=1)
    assert poison(engine)[0] == "ready"
    assert poison(engine)[0] == "failed"
    assert engine.model.restarts == 1


def test_work_before_a_restart_says_nothing_of_ranks_that_cannot_repeat_it(engines):
    engine = engines(restart_limit=3)
    assert works(engine)

    def lose(name, inputs):
        if (inputs["attention_mask"] > 0).any():
            engine.model.dead = True
            raise RankFailedError(RAISED, 0, REMOTE)

    engine.model.fail = lose
    assert poison(engine)[0] == "ready", "excused; then what worked is repeated, in vain, and once more without it"
    assert engine.model.restarts == 2
    assert [poison(engine)[0] for _ in range(3)] == ["ready", "ready", "failed"], "counted, and one too many"


def test_without_restarts_even_an_excused_failure_is_the_end_and_its_traceback_is_for_the_log_alone(engines, caplog):
    engine = engines(restart_limit=0)
    assert works(engine)
    with pytest.raises(EngineFailedError, match="index out of range") as caught:
        engine.submit(request(POISON)).result(60)
    assert settled(engine) == "failed" and engine.model.restarts == 0
    told = [str(caught.value), engine.health().error, as_api_error(caught.value).message]
    assert isinstance(caught.value.__cause__, RankFailedError)
    told.append(as_api_error(caught.value.__cause__).message)
    assert [text for text in told if "index out of range" not in text or "secret.py" in text] == []
    assert "secret.py" in caplog.text
    with pytest.raises(GenerationError, match=r"index out of range$"):
        engines(restart_limit=1).submit(request(POISON)).result(60)


def test_failures_longer_ago_than_the_window_are_forgotten(engines):
    engine = engines(restart_limit=1, restart_window=0.1)
    assert die(engine) == "ready"
    time.sleep(0.15)  # never shorter
    assert die(engine) == "ready" and engine.model.restarts == 2


def test_a_failure_while_draining_is_the_end(engines):
    engine = engines(restart_limit=5)
    with held(engine.model):
        future = engine.submit(request(HARMLESS))
        wait_until(lambda: engine.health().step_running is not None)
        engine.model.die = True
        assert engine.drain(0) is False
    with pytest.raises(EngineFailedError):
        future.result(60)
    assert engine.wait_failed(60) and engine.model.restarts == 0


def test_whoever_shared_the_failed_step_goes_alone_and_before_all_others(engines):
    """One of four broke the step: the four are tried one by one in their order; later ones share steps again. After
    each restart the last step that worked is repeated."""
    engine = engines(restart_limit=1)
    firsts, others = [1, 2, POISON, 4], [11, 12, 13, 14]
    with held(engine.model):
        futures = [engine.submit(request(HARMLESS))]
        wait_until(lambda: engine.health().step_running is not None)
        futures += [engine.submit(request(first)) for first in firsts + others]
    with pytest.raises(GenerationError, match="index out of range"):
        futures[1 + firsts.index(POISON)].result(60)
    for future in (*futures[:3], *futures[4:]):
        future.result(60)
    assert engine.model.batches == [[HARMLESS], firsts, [HARMLESS], [1], [2], [POISON], [2], [4], others]
    assert engine.model.restarts == 2 and settled(engine) == "ready"


class Lost:
    """Ranks that are gone: they have descriptors and shared memory until nothing refers to them."""

    failure: Exception


def test_lost_ranks_are_let_go_at_once(engines):
    """The error that they keep, and that the engine keeps, has frames in which they are known."""
    engine = engines()
    seen = []

    def lose(name, inputs):
        lost = Lost()
        seen.append(weakref.ref(lost))
        engine.model.dead = True
        engine.model.fail = lambda name, inputs: None
        lost.failure = RankDiedError("rank 0 died", 0)
        try:
            raise ConnectionResetError("its channel")
        except ConnectionResetError as error:
            raise lost.failure from error

    gc.collect()
    gc.disable()
    try:
        engine.model.fail = lose
        future = engine.submit(request(HARMLESS))
        assert isinstance(future.exception(60), EngineFailedError)
        assert settled(engine) == "ready" and engine.health().error == "rank 0 died"
        assert seen[0]() is None
    finally:
        gc.enable()


def test_a_client_is_told_what_ended_the_ranks_and_errors_that_cause_each_other_are_let_go():
    """What ended the ranks is the cause of a later call's refusal, and is raised again while that is handled."""
    refused = ModelClosedError("the ranks of this model were ended; call restart()")
    refused.__cause__ = lost = RankDiedError("rank 1 was ended")
    assert summary(refused) == "rank 1 was ended"
    assert "restart()" not in str(EngineFailedError(refused))
    for error in (lost, refused):
        try:
            raise error
        except (RankDiedError, ModelClosedError):
            pass
    refused.__cause__, lost.__context__ = lost, refused
    assert lost.__traceback__ and refused.__traceback__
    forget_frames(lost)
    assert lost.__traceback__ is None and refused.__traceback__ is None


def short_of(number: int) -> RankStartError:
    error = RankStartError("the system does not let the ranks start")
    error.__cause__ = OSError(number, os.strerror(number))
    return error


def test_ranks_for_which_the_system_has_no_room_now_are_tried_again_while_something_else_bounds_that(monkeypatch):
    monkeypatch.setattr("nxd_server.engine.rank_restarts.LONGEST_PAUSE", 0.001)
    restarts = RankRestarts(limit=1, window=600.0)
    restarts.bounded = True
    numbers = [errno.EAGAIN, errno.ENOMEM, errno.EMFILE] * 2
    assert restarts.run(Mock(side_effect=[*map(short_of, numbers), None]), False, str) is None and restarts.count == 7
    restarts.end()
    assert "as often as max_restarts allows" in restarts.refusal(False), "the first one counted"
    assert not restarts.refusal(True)
    alone = RankRestarts(limit=1, window=600.0)
    failed = alone.run(Mock(side_effect=short_of(errno.EAGAIN)), False, str)
    assert failed is not None and alone.count == 1 and "as often as max_restarts allows" in failed[1]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (short_of(errno.EFBIG), ""),
        (short_of(errno.EMFILE), "the engine ends"),  # which is not kept waiting for room
        (RankFailedError("rank 0 raised: ArtifactCorruptError", 0, "nxd_infer.errors.ArtifactCorruptError: x"), ""),
        (ModelClosedError("the model was closed"), ""),
        (RankDiedError("rank 0 died", 0), "the engine ends"),
    ],
)
def test_a_start_that_another_one_would_not_help_is_the_last(error, why):
    restarts = RankRestarts(limit=3, window=600.0)
    found = restarts.run(Mock(side_effect=error), False, lambda: why)
    assert found is not None and found[0] is error and found[1] == "; ".join(filter(None, (str(error), why)))
    assert restarts.count == 1 and restarts.took is None
