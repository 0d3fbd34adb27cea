"""The cost of one execution of each graph, and the choice of the cheapest graph.

The cost of a graph that has not run yet is estimated from those that have, so every graph has one. Estimates are on
the high side (cost is assumed to be almost proportional to tokens), so that a large graph does not stall streams;
and a little below proportional, so that it is tried if it would be full. Its first execution corrects the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, TypeVar

RISE, FALL = 0.05, 0.5
"""How far one execution moves the estimate: noise only adds time, so a faster execution is trusted more."""
OUTLIER = 4.0
"""A single step counts for at most this many times the estimate: one page fault or busy core is not a trend."""
RECOVERY = 0.002
"""How far a graph that did not run moves back to its best time: slow on a busy machine, it gets another chance."""
PROPORTION = 0.9
"""The cost of a graph that never ran is assumed to grow with its tokens to this power."""
CLEAR_GAIN = 0.8
"""A larger graph that does no more useful work must cost less than this fraction of the smaller one."""


class Named(Protocol):
    """Anything with a graph's name."""

    @property
    def name(self) -> str: ...


G = TypeVar("G", bound=Named)


@dataclass(frozen=True)
class Graph:
    """One compiled step: ``batch`` rows of ``length`` tokens."""

    name: str
    batch: int
    length: int


class StepCosts:
    """Seconds per execution, by graph. Before anything is measured, larger graphs are assumed to cost more."""

    def __init__(self, graphs: Iterable[Graph], given: Mapping[str, float] | None = None):
        """``given``: fixed seconds by graph that override measurements: the same choices in every run.

        Raises ValueError for an unknown graph or a cost that is not positive.
        """
        self._tokens = {graph.name: max(1, graph.batch * graph.length) for graph in graphs}
        self._seconds = {name: 1e-3 + 1e-5 * tokens for name, tokens in self._tokens.items()}
        self._best: dict[str, float] = {}
        self._first: dict[str, float] = {}
        """Graphs that have run once for requests; that time includes touching memory for the first time."""
        self._given = frozenset(given or ())
        for name, seconds in (given or {}).items():
            if name not in self._seconds or not 0 < seconds < inf:
                known = ", ".join(self._seconds)
                raise ValueError(f"costs: {name!r} = {seconds!r}: expected seconds above 0 for one of {known}")
            self._seconds[name] = seconds

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def set(self, name: str, seconds: float) -> None:
        """Set ``seconds`` as the cost, replacing earlier measurements (used by warm-up)."""
        if name in self._given:
            return
        self._seconds[name] = self._best[name] = max(seconds, 1e-9)
        self._first.pop(name, None)
        for other in self._seconds.keys() - self._best.keys() - self._given:
            self._seconds[other] = self._estimate(self._tokens[other])

    def measured(self, name: str) -> bool:
        """Whether the graph's cost is measured; else it is an estimate."""
        return name in self._best or name in self._given

    def smallest_first(self, names: Iterable[str]) -> list[str]:
        """Return ``names`` ordered by the number of tokens per graph."""
        return sorted(names, key=lambda name: self._tokens.get(name, 0))

    def observe(self, name: str, seconds: float) -> None:
        """Update the estimate with one execution. Of a graph's first two, the faster one replaces it."""
        if name in self._given:
            return
        if name not in self._best:
            estimate = self._seconds[name] if self._best else seconds
            self.set(name, seconds)
            # If it only seems slow because it was cold, it is tried again later: see RECOVERY.
            self._best[name], self._first[name] = min(estimate, seconds), seconds
            return
        if name in self._first:
            self.set(name, min(self._first[name], seconds))
            return
        known = self._seconds[name]
        weight = FALL if seconds < known else RISE
        self._seconds[name] = max(known + weight * (min(seconds, OUTLIER * known) - known), 1e-9)
        self._best[name] = min(self._best[name], self._seconds[name])
        for other, best in self._best.items():
            if other != name:
                self._seconds[other] += RECOVERY * (best - self._seconds[other])

    def _estimate(self, tokens: int) -> float:
        """Estimate from the largest measured graph that is not larger, else from the smallest."""
        known = sorted((self._tokens[name], self._seconds[name]) for name in self._best if name in self._tokens)
        near, seconds = max((pair for pair in known if pair[0] <= tokens), default=known[0] if known else (1, 1e-3))
        return seconds * max(1.0, tokens / near) ** PROPORTION

    def cheapest(self, graphs: Sequence[G], useful: Callable[[G], float]) -> G:
        """Return the graph with the most ``useful`` work per second; ``graphs`` go from small to large, and
        padding must clearly pay."""
        chosen, most, rate = graphs[0], 0.0, -1.0
        for graph in graphs:
            work = useful(graph)
            speed = work / self._seconds[graph.name]
            if rate < 0 or speed > (rate if work > most else rate / CLEAR_GAIN):
                chosen, most, rate = graph, work, speed
        return chosen

    def as_dict(self) -> dict[str, float]:
        return dict(self._seconds)
