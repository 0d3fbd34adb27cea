"""Statistics of paired, interleaved runs: who goes when, medians with their spread, ratios, verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Summary:
    """Median, smallest and largest of some readings."""

    median: float
    low: float
    high: float
    count: int

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """``"12.1 (11.8-13.0)"``, each times ``scale``."""
        middle, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{middle} ({low}-{high})"


def summary(values: Sequence[float]) -> Summary:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no readings to summarise")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """The order of each round: everyone once, and everyone first, second, ... in turn."""
    return [[names[(place + number) % len(names)] for place in range(len(names))] for number in range(rounds)]


def interleaved(work: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call every entry of ``work`` with the round's number, ``rounds`` times, interleaved: A B A B ..."""
    results: dict[str, list[T]] = {name: [] for name in work}
    for number, order in enumerate(turns(list(work), rounds)):
        for name in order:
            results[name].append(work[name](number))
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round; what disturbs one round disturbs both of its readings."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


@dataclass(frozen=True)
class Turn:
    """One turn of someone: what was measured, the bandwidth read before and after, and whether the machine's cores
    stayed in one place (see :mod:`bench.placement`)."""

    value: float
    before: float
    after: float
    held: bool

    @property
    def bandwidth(self) -> float:
        return (self.before + self.after) / 2


Turns = Mapping[str, Sequence[Turn]]
"""By name, one a round."""


def values(found: Turns) -> dict[str, list[float]]:
    return {name: [turn.value for turn in of_one] for name, of_one in found.items()}


def bandwidth_of(found: Turns) -> Summary:
    """What was read around all turns."""
    return summary([reading for turns in found.values() for turn in turns for reading in (turn.before, turn.after)])


def record_of(found: Mapping[int, Turns]) -> dict[str, Any]:
    """All of all turns, for the record."""
    return {
        str(key): {name: [asdict(turn) for turn in turns] for name, turns in one.items()} for key, one in found.items()
    }


def held_ratios(ours: Sequence[Turn], theirs: Sequence[Turn]) -> tuple[list[float], str]:
    """The ratios of the rounds in which both sides kept the place, and how many they are, in words. All of them where
    fewer than two did: those compare what is not alike, and the words say so."""
    found = ratios([turn.value for turn in ours], [turn.value for turn in theirs])
    held = [ratio for ratio, one, other in zip(found, ours, theirs, strict=True) if one.held and other.held]
    words = f"{len(held)} of {len(found)} rounds held"
    return (held, words) if len(held) > 1 else (found, f"{words}: MEASURED IN DIFFERENT PLACES")


@dataclass(frozen=True)
class Verdict:
    """One row of the project's table: what was measured, against what it must and should be."""

    row: str
    measured: Summary
    must: float
    aim: float
    better: Literal["higher", "lower"] = "higher"
    unit: str = "x"
    note: str = ""

    @property
    def result(self) -> Literal["aim", "must", "short"]:
        """Whether the median reaches the aim, what is needed, or neither."""
        for name in ("aim", "must"):
            limit = getattr(self, name)
            reached = self.measured.median >= limit if self.better == "higher" else self.measured.median <= limit
            if reached:
                return name  # pyright: ignore[reportReturnType]
        return "short"

    @property
    def certain(self) -> bool:
        """Whether every single round says the same about what is needed."""
        limits = (self.measured.low, self.measured.high)
        reached = [value >= self.must if self.better == "higher" else value <= self.must for value in limits]
        return all(reached) or not any(reached)
