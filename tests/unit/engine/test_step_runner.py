"""What graphs cost: which of them run before requests and between them, what is believed of the others, and when a
step is overdue. With a clock of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxd_server.engine.step_runner import (
    FIRST_SECONDS,
    OVERDUE_FACTOR,
    OVERDUE_SECONDS,
    WARM_UP_SECONDS,
    Graph,
    StepCosts,
    StepRunner,
)

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
        self.now += self.seconds[name]
        self.ran.append(name)
        return {}


def machine(seconds):
    """A runner over ranks that take ``seconds``, with costs of which nothing is known; and its ranks."""
    ranks = Ranks(seconds)
    return StepRunner(ranks, StepCosts(GRAPHS), lambda name: {}, ranks.monotonic), ranks


def warm(steps, progress=None):
    steps.warm_up(progress, lambda: True)


def test_small_graphs_all_run_before_requests_smallest_first():
    steps, ranks = machine({name: seconds / 100 for name, seconds in LARGE.items()})
    reports = []
    warm(steps, lambda *words: reports.append(words))
    order = ["decode_b1", "decode_b4", "decode_b16", "prefill_s128", "prefill_s512"]
    assert list(dict.fromkeys(ranks.ran)) == order
    assert all(steps.costs.measured(name) for name in NAMES)
    assert reports == [*((done, 5, name) for done, name in enumerate(order)), (5, 5, "")]


def test_large_graphs_wait_for_somebody_who_needs_them_or_until_the_engine_is_idle():
    seconds = {name: seconds / 2 for name, seconds in LARGE.items()}
    steps, ranks = machine(seconds)
    costs = steps.costs
    warm(steps)
    assert ranks.now <= 2 * seconds["decode_b1"] + WARM_UP_SECONDS, "the first is cold, and runs once more"
    assert f"as they fit into {WARM_UP_SECONDS:g} seconds," in GUIDE.read_text()
    assert "decode_b4" in ranks.ran and "prefill_s512" not in ranks.ran
    # What never ran is taken to be dear: streams are not held up by a prompt of 512 that seems to cost nothing.
    assert costs["prefill_s512"] > costs["prefill_s128"] > costs["decode_b4"]
    left = [name for name in costs.smallest_first() if not costs.measured(name)]
    for name in left:
        ranks.ran = []
        ranks.now += costs[name] - 0.01
        steps.when_idle(probe=1e9)
        assert ranks.ran == [], "it was not idle for as long as that takes"
        ranks.now += 0.02
        steps.when_idle(probe=1e9)
        assert ranks.ran == [name] and costs[name] == pytest.approx(seconds[name])
    ranks.ran = []
    ranks.now += 2.0
    steps.when_idle(probe=2.0)
    assert ranks.ran == ["decode_b1"], "a sign of life"


def test_a_start_waits_for_one_step_of_a_large_model_whose_cold_time_counts_until_the_next():
    steps, ranks = machine({name: 3 * seconds for name, seconds in LARGE.items()})
    warm(steps)
    assert ranks.ran == ["decode_b1"] and steps.costs["decode_b1"] == pytest.approx(3 * LARGE["decode_b1"])
    ranks.seconds, ranks.ran = LARGE, []
    ranks.now += steps.costs["decode_b1"] + 0.01
    steps.when_idle(probe=1e9)
    assert ranks.ran == ["decode_b1"] and steps.costs["decode_b1"] == pytest.approx(LARGE["decode_b1"])


def test_ranks_that_were_started_again_run_one_graph_and_what_is_known_stays():
    steps, ranks = machine(LARGE)
    warm(steps)
    known, ranks.ran = steps.costs.as_dict(), []
    ranks.seconds = {name: 5 * seconds for name, seconds in LARGE.items()}  # they are cold again
    warm(steps)
    assert ranks.ran == ["decode_b1"] and steps.costs.as_dict() == known


def test_a_step_is_overdue_when_it_takes_many_times_what_it_costs():
    steps, ranks = machine(LARGE)
    steps.costs.set("decode_b1", 1.0)
    with steps.visible("decode_b1"):
        found = []
        for ranks.now in (OVERDUE_SECONDS, OVERDUE_FACTOR, OVERDUE_FACTOR + 1):
            found.append(steps.overdue)
    assert found == ["", "", "a step of decode_b1 has been running for 21.0 s (limit 20.0 s)"]
    assert steps.overdue == "" and steps.running_for is None
    steps, ranks = machine(LARGE)
    with steps.visible("prefill_s128"):  # a first step that is slow is no hang
        ranks.now += OVERDUE_SECONDS + 1
        assert OVERDUE_SECONDS + 1 < FIRST_SECONDS and not steps.overdue
        ranks.now += 100.0
        assert "has been running" in steps.overdue


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
