"""What graphs cost: which of them run before requests and between them, what is believed of the others, and when a
step is overdue. With a clock of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxd_server.engine import warmup
from nxd_server.engine.core.step_costs import Graph, StepCosts
from nxd_server.engine.core.step_runner import FIRST_SECONDS, OVERDUE_FACTOR, OVERDUE_SECONDS, WARM_SECONDS, StepRunner
from nxd_server.engine.warmup import WARM_UP_SECONDS, warm_up, when_idle

GUIDE = Path(__file__).parents[3] / "docs/deploying.md"
GRAPHS = [Graph(f"decode_b{b}", b, 1) for b in (1, 4, 16)] + [Graph(f"prefill_s{s}", 1, s) for s in (512, 128)]
NAMES = [graph.name for graph in GRAPHS]
LARGE = {"decode_b1": 0.35, "decode_b4": 0.4, "decode_b16": 0.6, "prefill_s128": 1.5, "prefill_s512": 6.0}
"""What steps of a model of 3 billion parameters take on two cores."""


class Ranks:
    """A model whose steps take the seconds that are written down, on a clock that nothing else moves."""

    def __init__(self, seconds):
        self.seconds, self.now, self.ran = seconds, 0.0, []

    def monotonic(self):
        return self.now

    def run_bucket(self, name: str, inputs: Any) -> dict[str, Any]:
        known = self.seconds
        self.now += known[name] if isinstance(known, dict) else known.pop(0)
        self.ran.append(name)
        return {}


@pytest.fixture
def machine(monkeypatch):
    """Makes a runner over ranks that take ``seconds``, its ranks, and costs of which nothing is known."""

    def make(seconds):
        ranks = Ranks(seconds)
        monkeypatch.setattr(warmup, "time", ranks)
        return StepRunner(ranks, ranks.monotonic), ranks, StepCosts(GRAPHS)

    return make


def warm(steps, costs, progress=None):
    warm_up(steps, costs, NAMES, lambda name: {}, progress, lambda: True)


def test_small_graphs_all_run_before_requests_smallest_first(machine):
    steps, ranks, costs = machine({name: seconds / 100 for name, seconds in LARGE.items()})
    told = []
    warm(steps, costs, lambda *words: told.append(words))
    order = ["decode_b1", "decode_b4", "decode_b16", "prefill_s128", "prefill_s512"]
    assert list(dict.fromkeys(ranks.ran)) == order
    assert all(costs.measured(name) for name in NAMES)
    assert told == [*((done, 5, name) for done, name in enumerate(order)), (5, 5, "")]


def test_large_graphs_wait_for_somebody_who_needs_them(machine):
    seconds = {name: seconds / 2 for name, seconds in LARGE.items()}
    steps, ranks, costs = machine(seconds)
    told = []
    warm(steps, costs, lambda *words: told.append(words))
    first = 2 * seconds["decode_b1"]  # cold, and once more
    assert ranks.now <= first + WARM_UP_SECONDS
    assert f"as they fit into {WARM_UP_SECONDS:g} seconds," in GUIDE.read_text()
    assert "decode_b4" in ranks.ran and "prefill_s512" not in ranks.ran
    assert told[-1] == (len(set(ranks.ran)), len(NAMES), "") and {total for _, total, _ in told} == {len(NAMES)}
    # What never ran is taken to be dear: streams are not held up by a prompt of 512 that seems to cost nothing.
    assert costs["prefill_s512"] > costs["prefill_s128"] > costs["decode_b4"]
    assert costs["decode_b4"] == pytest.approx(seconds["decode_b4"])


def test_ranks_that_were_started_again_run_one_graph_and_what_is_known_stays(machine):
    steps, ranks, costs = machine(LARGE)
    warm(steps, costs)
    known, ranks.ran = costs.as_dict(), []
    ranks.seconds = {name: 5 * seconds for name, seconds in LARGE.items()}  # they are cold again
    warm(steps, costs)
    assert ranks.ran == ["decode_b1"] and costs.as_dict() == known


def test_an_idle_engine_runs_what_is_left_when_it_was_idle_for_as_long_as_that_takes(machine):
    steps, ranks, costs = machine(LARGE)
    warm(steps, costs)
    left = [name for name in costs.smallest_first(NAMES) if not costs.measured(name)]
    assert left
    ranks.ran = []
    for name in left:
        ranks.now += costs[name] - 0.01
        when_idle(steps, costs, NAMES, lambda name: {}, probe=1e9)
        assert ranks.ran == []
        ranks.now += 0.02
        when_idle(steps, costs, NAMES, lambda name: {}, probe=1e9)
        assert ranks.ran == [name] and costs[name] == pytest.approx(LARGE[name])
        ranks.ran = []
    ranks.now += 2.0
    when_idle(steps, costs, NAMES, lambda name: {}, probe=2.0)
    assert ranks.ran == ["decode_b1"], "a sign of life"


SLOW, FAST = 2 * WARM_SECONDS, WARM_SECONDS / 10


def test_the_first_graph_and_small_ones_are_measured_again_and_large_ones_once(machine):
    """A rank that is cold takes long for whatever comes first; a graph that seems slow would never be chosen again."""
    steps, ranks, _ = machine([SLOW, FAST, SLOW, FAST, FAST])
    assert steps.measure("first", {}) == pytest.approx(FAST)
    assert steps.measure("large", {}) == pytest.approx(SLOW) and len(ranks.seconds) == 2
    assert steps.measure("small", {}) == pytest.approx(FAST) and ranks.seconds == []


def test_a_step_is_overdue_when_it_takes_many_times_what_it_costs(machine):
    steps, ranks, _ = machine(LARGE)
    costs = StepCosts([Graph("g", 1, 1)], {"g": 1.0})
    with steps.visible("g"):
        found = []
        for ranks.now in (OVERDUE_SECONDS, OVERDUE_FACTOR, OVERDUE_FACTOR + 1):
            found.append(steps.overdue(costs))
    assert found == ["", "", "a step of g has been running for 21.0 s (limit 20.0 s)"]
    assert steps.overdue(costs) == "" and steps.running_for is None
    steps, ranks, costs = machine(LARGE)  # a first step that is slow is no hang
    costs.set("decode_b1", 0.01)
    with steps.visible("prefill_s128"):
        ranks.now += OVERDUE_SECONDS + 1
        assert OVERDUE_SECONDS + 1 < FIRST_SECONDS and not steps.overdue(costs)
        ranks.now += 100.0
        assert "has been running" in steps.overdue(costs)
    with steps.visible("decode_b1"):
        ranks.now += OVERDUE_SECONDS + 1
        assert "has been running" in steps.overdue(costs)


def test_costs_follow_measurements_and_one_outlier_changes_little():
    costs = StepCosts(GRAPHS)
    costs.set("decode_b1", 0.35)
    guess = costs["decode_b16"]
    assert 0.35 < guess < 16 * 0.35, "so little below proportion that 16 streams are worth a try"
    costs.observe("decode_b16", 1.2)  # cold
    assert costs["decode_b16"] == 1.2
    costs.observe("decode_b16", 0.6)
    assert costs["decode_b16"] == 0.6
    costs.observe("decode_b16", 1.2)
    assert costs["decode_b16"] < 0.7, "from then on one execution changes little"
    for _ in range(200):
        costs.observe("decode_b16", 2.0)
    assert costs["decode_b16"] == pytest.approx(2.0, rel=0.01)


def test_a_graph_that_was_slow_on_a_busy_machine_or_a_cold_one_gets_another_chance():
    costs = StepCosts(GRAPHS)
    costs.set("decode_b1", 0.01)
    costs.set("decode_b4", 0.02)
    costs.observe("decode_b16", 9.0)
    for _ in range(100):
        costs.observe("decode_b1", 0.05)
    assert costs["decode_b1"] > 0.04
    for _ in range(4000):
        costs.observe("decode_b4", 0.02)
    assert costs["decode_b1"] < 0.011 and costs["decode_b16"] < 4.0


def test_given_costs_hold_whatever_is_measured():
    costs = StepCosts(GRAPHS, {"decode_b1": 0.03})
    costs.set("decode_b1", 0.01)
    costs.observe("decode_b1", 0.02)
    costs.observe("decode_b4", 0.02)
    assert (costs["decode_b1"], costs["decode_b4"]) == (0.03, 0.02) and costs.as_dict()["decode_b1"] == 0.03
    for wrong in ({"decode_b9": 1.0}, {"decode_b1": 0.0}, {"decode_b1": float("nan")}):
        with pytest.raises(ValueError, match=r"costs: 'decode_b\d' = .*: expected seconds above 0 for one of"):
            StepCosts(GRAPHS, wrong)
