"""What the engine takes a graph's time for."""

from __future__ import annotations

from typing import Any

import pytest

from nxd_infer.errors import RankDiedError
from nxd_server.engine.core.step_costs import Graph, StepCosts
from nxd_server.engine.core.step_runner import OVERDUE_FACTOR, OVERDUE_SECONDS, WARM_SECONDS, StepRunner
from tests.support.engine.toy_model import ToyModel


class Model:
    """Takes a given number of seconds per call, on its own clock."""

    def __init__(self, *seconds: float):
        self.seconds = list(seconds)
        self.now = 0.0

    def run_bucket(self, name: str, inputs: Any) -> dict[str, Any]:
        self.now += self.seconds.pop(0)
        return {}


def runner_of(model: Model) -> StepRunner:
    return StepRunner(model, clock=lambda: model.now)


SLOW, FAST = 2 * WARM_SECONDS, WARM_SECONDS / 10


def test_the_first_graph_is_measured_again_however_long_it_took():
    """A rank that is cold takes long for whatever comes first; a graph that seems slow would never be chosen again."""
    model = Model(SLOW, FAST)
    assert runner_of(model).measure("first", {}) == pytest.approx(FAST)
    assert model.seconds == []


def test_a_large_graph_is_run_once_and_a_small_one_twice():
    model = Model(FAST, FAST, SLOW, FAST, FAST)
    runner = runner_of(model)
    assert runner.measure("first", {}) == pytest.approx(FAST)
    assert runner.measure("large", {}) == pytest.approx(SLOW) and len(model.seconds) == 2
    assert runner.measure("small", {}) == pytest.approx(FAST) and model.seconds == []


def test_a_step_is_overdue_when_it_takes_many_times_what_it_costs():
    found, costs = [], StepCosts([Graph("g", 1, 1)], {"g": 1.0})

    class Slow(Model):
        def run_bucket(self, name: str, inputs: Any) -> dict[str, Any]:
            for self.now in (OVERDUE_SECONDS, OVERDUE_FACTOR, OVERDUE_FACTOR + 1):
                found.append(runner.overdue(costs))
            return {}

    runner = runner_of(Slow())
    runner.timed("g", {})
    assert found == ["", "", "a step of g has been running for 21.0 s (limit 20.0 s)"]
    assert runner.overdue(costs) == "" and runner.running_for is None


class Ended(ToyModel):
    """Its rank has ended, and why is known a moment later."""

    def __init__(self):
        super().__init__()
        self.dead, self.reasons = True, [None, None, RankDiedError("rank 0 was ended by SIGKILL", 0)]

    @property
    def failure(self):
        return self.reasons.pop(0)


def test_why_a_rank_has_ended_is_waited_for():
    with pytest.raises(RankDiedError, match="SIGKILL"):
        StepRunner(Ended()).check_alive()
