"""The statistics behind every verdict of the benchmarks."""

from __future__ import annotations

import pytest

from bench.peers.driver import PeerError, Run
from bench.stats import Summary, Turn, Verdict, bandwidth_of, held_ratios, interleaved, ratios, summary, values


def test_a_summary_is_the_median_and_the_range():
    assert summary([3.0, 1.0, 2.0]) == Summary(2.0, 1.0, 3.0, 3)
    assert summary([4.0, 1.0]) == Summary(2.5, 1.0, 4.0, 2)
    assert summary([0.0123]).text(1e3) == "12.3 (12.3-12.3)"
    with pytest.raises(ValueError, match="no readings"):
        summary([])


def test_interleaved_calls_a_b_then_b_a_and_keeps_results_by_round():
    calls: list[str] = []

    def work(name: str):
        return lambda number: calls.append(f"{name}{number}") or (name, number)

    results = interleaved({"a": work("a"), "b": work("b")}, 3)
    assert calls == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert results == {"a": [("a", 0), ("a", 1), ("a", 2)], "b": [("b", 0), ("b", 1), ("b", 2)]}


def test_ratios_are_taken_round_by_round():
    """The machine is half as fast in the second round: of both alike, so the ratio stays."""
    assert ratios([200.0, 100.0], [100.0, 50.0]) == [2.0, 2.0]
    with pytest.raises(ValueError):
        ratios([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    "values, better, result, certain",
    [
        ([3.6, 3.5, 3.7], "higher", "aim", True),
        ([3.4, 3.4, 3.5], "higher", "must", True),
        ([2.4, 2.4, 2.4], "higher", "short", True),
        ([2.6, 2.6, 2.4], "higher", "must", False),
        ([2.4, 2.4, 2.6], "higher", "short", False),
        ([2.0, 2.1, 2.2], "lower", "aim", True),
        ([3.0, 3.4, 3.6], "lower", "must", False),
        ([3.6, 3.7, 3.8], "lower", "short", True),
    ],
)
def test_a_verdict_compares_the_median_and_says_when_rounds_differ(values, better, result, certain):
    must, aim = (2.5, 3.5) if better == "higher" else (3.5, 2.5)
    verdict = Verdict("row", summary(values), must, aim, better)
    assert (verdict.result, verdict.certain) == (result, certain)


def test_ratios_count_where_both_sides_kept_the_place():
    def turns_of(values: list[float], held: list[bool]) -> list[Turn]:
        return [Turn(value, 40e9, 80e9, kept) for value, kept in zip(values, held, strict=True)]

    ours, theirs = [10.0, 20.0, 30.0, 40.0], [10.0, 10.0, 10.0, 10.0]
    kept = turns_of(ours, [True, True, False, True])
    found, rounds = held_ratios(kept, turns_of(theirs, [True, True, True, False]))
    assert found == [1.0, 2.0] and rounds == "2 of 4 rounds held"
    found, rounds = held_ratios(kept, turns_of(theirs, [True, False, True, False]))
    assert found == [1.0, 2.0, 3.0, 4.0] and rounds == "1 of 4 rounds held: MEASURED IN DIFFERENT PLACES"
    with pytest.raises(ValueError):
        held_ratios(kept, kept[1:])
    assert values({"a": kept}) == {"a": ours}
    assert bandwidth_of({"a": kept[:1]}) == Summary(60e9, 40e9, 80e9, 2)
    assert kept[0].bandwidth == 60e9


def test_the_rate_counts_only_while_every_row_decodes():
    """Two rows, 10 and 20 tokens a second, the second 1 s late: of the first, what lies in between counts."""
    early, late = [0.5 + 0.1 * n for n in range(21)], [1.5 + 0.05 * n for n in range(21)]
    run = Run([[0] * 21] * 2, [early, late])
    assert run.first == 1.5
    assert run.rate == pytest.approx(30.0, rel=0.05)
    with pytest.raises(PeerError, match="all rows decoded"):
        _ = Run([[0, 0]] * 2, [[0.1, 0.2], [0.3, 0.4]]).rate
