"""Turns are held to one place of the machine's cores; tried on written-down moves."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest

from bench import placement
from bench.placement import TRIES, Placement

NEAR, APART = 45.0, 220.0
SEEN = [(80e9, 230.0), (41e9, 44.0), (78e9, 210.0), (40e9, 61.0), (60e9, 220.0)]


class Moves:
    """Gives the hops in turn, the last one for good."""

    def __init__(self, hops: Iterable[float]):
        self.hops = list(hops)
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return self.hops.pop(0) if len(self.hops) > 1 else self.hops[0]


def held(hops: Iterable[float], patience: float = 60.0, seen: Iterable[tuple[float, float]] = SEEN):
    moves, calls = Moves(hops), []
    place = Placement(list(seen), moves, lambda: 50e9, patience)
    return *place.held(lambda: calls.append(moves.asked) or len(calls)), moves.asked


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(placement, "PAUSE", 0.001)


def test_the_wanted_place_is_the_one_with_more_bandwidth():
    assert Placement(list(SEEN)).wanted() == 220.0
    assert Placement([(bandwidth, 300.0 - hop) for bandwidth, hop in SEEN]).wanted() == 80.0
    assert Placement().wanted() is None


CASES = {
    "it waits for the place": ([NEAR, NEAR, 70.0, APART, 250.0], {}, (1, True, 5)),
    "it is repeated where the cores moved": ([APART, NEAR, NEAR, APART, APART], {}, (2, True, 5)),
    "it is not repeated for ever": ([APART, NEAR] * 20, {}, (TRIES, False)),
    "without patience it is measured where the cores are": ([NEAR], {"patience": 0.0}, (1, False, 1)),
    "patience ends": ([NEAR], {"patience": 0.02}, (1, False)),
    "cores that stay": ([50.0, 80.0], {"seen": [(40e9, 45.0)]}, (1, True, 2)),
    "one core": ([0.0], {"seen": [(40e9, 0.0)]}, (1, True, 2)),
    "the place is unknown": ([NEAR], {"seen": []}, (1, False, 0)),
    "they never run at once": ([math.inf], {"patience": 0.01}, (1, False)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_turn_is_held_to_the_place(case):
    """How often it was run, whether in the place all the time, and how often that was looked for."""
    hops, options, expected = CASES[case]
    assert held(hops, **options)[: len(expected)] == expected


def test_what_a_turn_raises_is_raised():
    place = Placement(list(SEEN), Moves([APART]), lambda: 50e9)
    with pytest.raises(KeyError, match="mine"):
        place.held(lambda: {}["mine"])


def test_a_bandwidth_during_which_the_cores_moved_is_not_believed():
    place = Placement([], Moves([NEAR, APART, APART, APART]), lambda: 70e9)
    place.look(2)
    assert place.seen == [(70e9, APART)]
