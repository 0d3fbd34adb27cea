"""What the engine takes a graph's time for."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nxd_server.engine.runner import WARM_SECONDS, StepRunner


class Model:
    """Takes the seconds that are written down, call by call."""

    def __init__(self, *seconds: float):
        self.seconds = list(seconds)

    def run_bucket(self, name: str, inputs: Any) -> dict[str, Any]:
        time.sleep(self.seconds.pop(0))
        return {}


SLOW, FAST = 2 * WARM_SECONDS, WARM_SECONDS / 10


@pytest.mark.check
def test_the_first_graph_is_measured_again_however_long_it_took():
    """A rank that is cold takes long for whatever comes first; a graph that seems slow would never be chosen again."""
    model = Model(SLOW, FAST)
    assert FAST <= StepRunner(model).measure("first", {}) < SLOW
    assert model.seconds == []


@pytest.mark.check
def test_a_large_graph_is_run_once_and_a_small_one_twice():
    model = Model(FAST, FAST, SLOW, FAST, FAST)
    runner = StepRunner(model)
    assert runner.measure("first", {}) >= FAST
    assert runner.measure("large", {}) >= SLOW and len(model.seconds) == 2
    assert runner.measure("small", {}) >= FAST and model.seconds == []
