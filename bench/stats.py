"""Statistics of paired, interleaved runs: order of turns, medians with their range, ratios, verdicts."""

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
        """Return for example ``"12.1 (11.8-13.0)"``, each value times ``scale``."""
        middle, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{middle} ({low}-{high})"


def summary(values: Sequence[float]) -> Summary:
    """Summarise values. Raises ValueError without any."""
    if not values:
        raise ValueError("no readings to summarise")
    return Summary(statistics.median(values), min(values), max(values), len(values))


def turns(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Return the order of each round: every name once, rotated by one each round."""
    return [[names[(place + number) % len(names)] for place in range(len(names))] for number in range(rounds)]


def interleaved(work: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Call every entry of ``work`` with the round's number, ``rounds`` times, interleaved: A B A B ..."""
    results: dict[str, list[T]] = {name: [] for name in work}
    for number, order in enumerate(turns(list(work), rounds)):
        for name in order:
            results[name].append(work[name](number))
    return results


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ratios round by round: a disturbance in a round affects both of its readings."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


@dataclass(frozen=True)
class Turn:
    """One turn: the measurement, the bandwidth before and after, and whether the core placement stayed the same
    (see :mod:`bench.placement`)."""

    value: float
    before: float
    after: float
    held: bool

    @property
    def bandwidth(self) -> float:
        return (self.before + self.after) / 2


Turns = Mapping[str, Sequence[Turn]]
"""By name, one per round."""


def values(found: Turns) -> dict[str, list[float]]:
    return {name: [turn.value for turn in of_one] for name, of_one in found.items()}


def bandwidth_of(found: Turns) -> Summary:
    """Summarise the bandwidth around all turns."""
    return summary([reading for turns in found.values() for turn in turns for reading in (turn.before, turn.after)])


def record_of(found: Mapping[int, Turns]) -> dict[str, Any]:
    """Return all data of all turns, for the record."""
    return {
        str(key): {name: [asdict(turn) for turn in turns] for name, turns in one.items()} for key, one in found.items()
    }


def held_ratios(ours: Sequence[Turn], theirs: Sequence[Turn]) -> tuple[list[float], str]:
    """Return the ratios of rounds in which both sides kept the placement, and a note with their number. With fewer than
    two such rounds, return all ratios, which are not comparable; the note says so."""
    found = ratios([turn.value for turn in ours], [turn.value for turn in theirs])
    held = [ratio for ratio, one, other in zip(found, ours, theirs, strict=True) if one.held and other.held]
    words = f"{len(held)} of {len(found)} rounds held"
    return (held, words) if len(held) > 1 else (found, f"{words}: MEASURED IN DIFFERENT PLACES")


@dataclass(frozen=True)
class Verdict:
    """One row of the project's table: the measurement, the requirement and the aim."""

    row: str
    measured: Summary
    must: float
    aim: float
    better: Literal["higher", "lower"] = "higher"
    unit: str = "x"
    note: str = ""

    @property
    def result(self) -> Literal["aim", "must", "short"]:
        """Whether the median reaches the aim, only the requirement, or neither."""
        for name in ("aim", "must"):
            limit = getattr(self, name)
            reached = self.measured.median >= limit if self.better == "higher" else self.measured.median <= limit
            if reached:
                return name  # pyright: ignore[reportReturnType]
        return "short"

    @property
    def certain(self) -> bool:
        """Whether all rounds are on the same side of the requirement."""
        limits = (self.measured.low, self.measured.high)
        reached = [value >= self.must if self.better == "higher" else value <= self.must for value in limits]
        return all(reached) or not any(reached)
