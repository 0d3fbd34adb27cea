"""What one execution of each graph costs, as measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

SMOOTHING = 0.1
OUTLIER = 4.0
"""A single step counts for at most this many times the estimate: one page fault or one busy core is no trend."""


@dataclass(frozen=True)
class Graph:
    """One compiled step: ``batch`` rows of ``length`` tokens."""

    name: str
    batch: int
    length: int


class StepCosts:
    """Seconds of one execution by graph. Before anything is measured, larger graphs are taken to cost more."""

    def __init__(self, graphs: Iterable[Graph]):
        self._seconds = {graph.name: 1e-3 + 1e-5 * graph.batch * graph.length for graph in graphs}
        self._measured: set[str] = set()

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def set(self, name: str, seconds: float) -> None:
        """Take ``seconds`` as the cost, whatever was known (warm-up does)."""
        self._seconds[name] = max(seconds, 1e-9)
        self._measured.add(name)

    def observe(self, name: str, seconds: float) -> None:
        """Let one execution correct the estimate."""
        if name not in self._measured:
            self.set(name, seconds)
            return
        known = self._seconds[name]
        self._seconds[name] = max(known + SMOOTHING * (min(seconds, OUTLIER * known) - known), 1e-9)

    def as_dict(self) -> dict[str, float]:
        return dict(self._seconds)
