"""Which graphs run without a request: before the engine is ready, and when it is idle.

Before the engine is ready, the smallest graph runs, which shows that the ranks work and loads their weights; then
others, smallest first, as long as they fit into ``WARM_UP_SECONDS``. The rest have estimated costs until they first
run: for a request, or, one at a time, when the engine has been idle for as long as such a step takes, so that a request
that arrives at random rarely waits for one. Measured costs survive a restart of the ranks, so one graph then suffices.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nxd_server.engine.core.step_costs import StepCosts
from nxd_server.engine.core.step_runner import StepRunner

WARM_UP_SECONDS = 0.75
"""Time limit for the graphs after the first, before the engine is ready."""

Progress = Callable[[int, int, str], None]
Inputs = Callable[[str], Mapping[str, Any] | None]
"""Padding inputs for a graph, by name; None if it cannot run without a request."""


def warm_up(
    steps: StepRunner,
    costs: StepCosts,
    names: Sequence[str],
    inputs: Inputs,
    on_progress: Progress | None,
    going: Callable[[], bool],
) -> None:
    """Run graphs before requests arrive, while ``going``; ``on_progress(done, total, bucket)`` is told the next graph
    each time, and "" at the end: then ``done`` may be less than ``total``, all graphs."""
    told = on_progress or (lambda done, total, bucket: None)
    ran: list[str] = []
    end = math.inf
    for name in costs.smallest_first(names):
        if ran and (costs.measured(name) or time.monotonic() + costs[name] > end):
            break
        if not going():
            return
        told(len(ran), len(names), name)
        padding = inputs(name)
        if padding is None:
            continue
        if costs.measured(name):
            steps.timed(name, padding)  # cold, so the time says nothing about later runs
        else:
            costs.set(name, steps.measure(name, padding))
        ran.append(name)
        end = min(end, time.monotonic() + WARM_UP_SECONDS)
    if ran:
        told(len(ran), len(names), "")


def when_idle(steps: StepRunner, costs: StepCosts, names: Sequence[str], inputs: Inputs, probe: float) -> None:
    """Run a graph that has not run yet, once the engine has been idle for as long as it may take. Otherwise, after
    ``probe`` idle seconds, run the cheapest graph, to check that the ranks still answer."""
    age = math.inf if steps.age is None else steps.age
    new = next((name for name in costs.smallest_first(names) if not costs.measured(name)), None)
    if new is not None and age >= costs[new] and (padding := inputs(new)) is not None:
        costs.set(new, steps.measure(new, padding))
    elif age >= probe:
        name = min(names, key=lambda name: costs.as_dict().get(name, 0.0))
        if (padding := inputs(name)) is not None:
            steps.timed(name, padding)
