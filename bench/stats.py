"""Statistics of paired, interleaved runs: who goes when, medians with their spread, ratios, verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

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


STEADY = 1.15
"""Readings of the bandwidth that lie no further apart are of one pace."""

Pace = tuple[float, float]
"""The bandwidth read before and after something was measured."""


def readings(paces: Mapping[str, Sequence[Pace]]) -> list[float]:
    """All of them."""
    return [reading for of_one in paces.values() for pace in of_one for reading in pace]


def steady(*paces: Pace) -> bool:
    """Whether memory kept its pace from the first of these readings to the last."""
    found = readings({"": paces})
    return max(found) < STEADY * min(found)


def ratios_at_one_pace(
    ours: Sequence[float], theirs: Sequence[float], our_paces: Sequence[Pace], their_paces: Sequence[Pace]
) -> tuple[list[float], str]:
    """The ratios of the rounds in which both sides met the same pace, of all where those are fewer than two; and how
    many they are, in words."""
    found = ratios(ours, theirs)
    same = [ratio for ratio, *paces in zip(found, our_paces, their_paces, strict=True) if steady(*paces)]
    return (same if len(same) > 1 else found), f"{len(same)} of {len(found)} rounds at one pace"


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
