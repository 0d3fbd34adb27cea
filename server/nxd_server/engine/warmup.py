"""Which graphs run on behalf of nobody, before requests come and between them.

Before the engine is ready, the smallest graph runs, which shows that the ranks work and reads their weights; then
others, smallest first, as long as they fit into ``WARM_UP_SECONDS``. The rest have estimated costs until they first
run: for requests, or, one at a time, when the engine has been idle for as long as such a step takes, so that whoever
comes at random hardly ever waits for one. What is known of costs outlives the ranks: after a restart one graph runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nxd_server.engine.core.step_costs import StepCosts
from nxd_server.engine.core.step_runner import StepRunner

WARM_UP_SECONDS = 0.75
"""What graphs may take before the engine is ready, beside the first."""

Progress = Callable[[int, int, str], None]
Inputs = Callable[[str], Mapping[str, Any] | None]
"""Inputs that run a graph on behalf of nobody; None when that is not possible."""


def warm_up(
    steps: StepRunner,
    costs: StepCosts,
    names: Sequence[str],
    inputs: Inputs,
    on_progress: Progress | None,
    going: Callable[[], bool],
) -> None:
    """Run graphs before requests, while ``going``; ``on_progress(done, total, bucket)`` follows, and ends with as many
    done as there are in all, of those that run now."""
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
            steps.timed(name, padding)  # cold: that says nothing of what it will take
        else:
            costs.set(name, steps.measure(name, padding))
        ran.append(name)
        end = min(end, time.monotonic() + WARM_UP_SECONDS)
    if ran:
        told(len(ran), len(ran), ran[-1])


def when_idle(steps: StepRunner, costs: StepCosts, names: Sequence[str], inputs: Inputs, probe: float) -> None:
    """Run a graph that has not run yet, once nothing has run for as long as it may take; else, once nothing has run for
    ``probe`` seconds, the cheapest one, to see that the ranks still answer."""
    age = math.inf if steps.age is None else steps.age
    new = next((name for name in costs.smallest_first(names) if not costs.measured(name)), None)
    if new is not None and age >= costs[new] and (padding := inputs(new)) is not None:
        costs.set(new, steps.measure(new, padding))
    elif age >= probe:
        name = min(names, key=lambda name: costs.as_dict().get(name, 0.0))
        if (padding := inputs(name)) is not None:
            steps.timed(name, padding)
