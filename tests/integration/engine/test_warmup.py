"""Which graphs run before requests and between them, and what is believed of the others: with a clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxd_server.engine import warmup
from nxd_server.engine.core.step_costs import Graph, StepCosts
from nxd_server.engine.core.step_runner import FIRST_SECONDS, OVERDUE_SECONDS, StepRunner
from nxd_server.engine.warmup import WARM_UP_SECONDS, warm_up, when_idle
from tests.support.engine.toy_model import ToyModel
from tests.support.processes import wait_until

GUIDE = Path(__file__).parents[3] / "docs/deployment.md"
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

    def run_bucket(self, name, inputs):
        self.now += self.seconds[name]
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


def test_a_first_step_that_is_slow_is_no_hang_and_one_that_was_measured_is(machine):
    steps, ranks, costs = machine(LARGE)
    costs.set("decode_b1", 0.01)
    with steps.visible("prefill_s128"):
        ranks.now += OVERDUE_SECONDS + 1
        assert OVERDUE_SECONDS + 1 < FIRST_SECONDS and not steps.overdue(costs)
        ranks.now += 100.0
        assert "has been running" in steps.overdue(costs)
    with steps.visible("decode_b1"):
        ranks.now += OVERDUE_SECONDS + 1
        assert "has been running" in steps.overdue(costs)


def test_the_first_executions_for_requests_say_what_a_graph_costs():
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


def test_a_graph_that_seemed_slow_when_it_was_cold_is_tried_again():
    costs = StepCosts(GRAPHS)
    costs.set("decode_b1", 0.35)
    costs.observe("decode_b4", 9.0)
    for _ in range(2000):
        costs.observe("decode_b1", 0.35)
    assert costs["decode_b4"] < 4 * 0.35


def test_costs_that_are_given_stay_whatever_is_measured():
    costs = StepCosts(GRAPHS, {"decode_b1": 0.5, "prefill_s128": 2.0})
    costs.set("decode_b1", 1.0)
    costs.observe("prefill_s128", 1.0)
    costs.observe("prefill_s512", 4.0)
    known = costs.as_dict()
    assert (known["decode_b1"], known["prefill_s128"], known["prefill_s512"]) == (0.5, 2.0, 4.0)


def test_a_recovery_runs_one_graph_before_requests(engines):
    model = ToyModel()
    engine = engines(model)
    known = engine.stats().step_seconds
    ran = []
    model.fail = lambda name, inputs: ran.append(name)
    model.dead = True
    wait_until(lambda: engine.stats().restarts == 1 and engine.state == "ready")
    assert ran == ["decode_b1"] and engine.stats().step_seconds == known
