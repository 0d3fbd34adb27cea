"""Turns are held to one place of the machine's cores; tried on written-down moves, and once on this machine."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable

import pytest

from bench import placement
from bench.placement import TRIES, Placement, read_hop

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
    return *place.held(lambda: calls.append(moves.asked) or len(calls)), moves.asked, place


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(placement, "PAUSE", 0.001)


def test_the_wanted_place_is_the_one_with_more_bandwidth():
    assert Placement(list(SEEN)).wanted() == 220.0
    assert Placement([(bandwidth, 300.0 - hop) for bandwidth, hop in SEEN]).wanted() == 80.0
    assert Placement().wanted() is None


def test_a_turn_waits_for_the_place():
    value, kept, asked, _ = held([NEAR, NEAR, 70.0, APART, 250.0])
    assert (value, kept, asked) == (1, True, 5)


def test_a_turn_in_which_the_cores_moved_is_repeated():
    value, kept, asked, _ = held([APART, NEAR, NEAR, APART, APART])
    assert (value, kept, asked) == (2, True, 5)


def test_a_turn_is_not_repeated_for_ever():
    value, kept, _, _ = held([APART, NEAR] * 20)
    assert (value, kept) == (TRIES, False)


def test_without_patience_a_turn_is_measured_where_the_cores_are():
    value, kept, asked, _ = held([NEAR], patience=0.0)
    assert (value, kept, asked) == (1, False, 1)
    value, kept, _, place = held([NEAR], patience=0.02)
    assert (value, kept) == (1, False) and place.patience <= 0


def test_nothing_waits_where_cores_stay_or_there_is_one():
    assert held([50.0, 80.0], seen=[(40e9, 45.0)])[:3] == (1, True, 2)
    assert held([0.0], seen=[(40e9, 0.0)])[:3] == (1, True, 2)


def test_a_turn_is_not_called_held_where_the_place_is_unknown():
    assert held([NEAR], seen=[])[:3] == (1, False, 0)
    value, kept, _, _ = held([math.inf], patience=0.01)
    assert (value, kept) == (1, False)


def test_what_a_turn_raises_is_raised():
    place = Placement(list(SEEN), Moves([APART]), lambda: 50e9)
    with pytest.raises(KeyError, match="mine"):
        place.held(lambda: {}["mine"])


def test_a_bandwidth_during_which_the_cores_moved_is_not_believed():
    place = Placement([], Moves([NEAR, APART, APART, APART]), lambda: 70e9)
    place.look(2)
    assert place.seen == [(70e9, APART)]


def test_the_hop_of_this_machine(tmp_path, monkeypatch):
    """Of two cores some tens to hundreds of nanoseconds; of one, none."""
    monkeypatch.setenv("NXD_INFER_BENCH", str(tmp_path))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        assert read_hop() > 5
    os.sched_setaffinity(0, cores[:1])
    try:
        assert read_hop() == 0.0
    finally:
        os.sched_setaffinity(0, cores)
    monkeypatch.setattr(placement, "output", lambda name, **_: subprocess.run(["false"], check=True))
    with pytest.raises(subprocess.CalledProcessError):
        read_hop()
    monkeypatch.setattr(placement, "output", lambda name, **_: subprocess.run(["sleep", "9"], timeout=0.1))
    assert read_hop() == math.inf
