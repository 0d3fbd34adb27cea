"""Guesses from the text itself, against a search from scratch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nxd_server.engine.lookup import RUNS, Lookup


def searched(text: list[int], count: int) -> tuple[int, ...]:
    """What stands behind the newest earlier place of the last 3 tokens, or else of the last 2, read on in circles."""
    for run in RUNS:
        for place in range(len(text) - 1, run - 1, -1):
            if len(text) > run and text[place - run : place] == text[-run:]:
                longer = text[place:]
                while len(longer) < count:
                    longer = longer + longer
                return tuple(longer[:count])
    return ()


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 6), st.integers(0, 40))
def test_guesses_equal_those_of_a_search(text, count, cut):
    lookup = Lookup()
    lookup.extend(text[:cut])
    lookup.guess(count)
    lookup.extend(text[cut:])
    assert lookup.guess(count) == searched(text, count)[:count]


def test_examples():
    lookup = Lookup()
    lookup.extend([1, 2, 3, 9, 8, 2, 3, 7, 7, 1, 2, 3])
    assert lookup.guess(4) == (9, 8, 2, 3), "three tokens are surer than the newer two"
    lookup.extend([4, 2, 3])
    assert lookup.guess(3) == (4, 2, 3), "of two places the newer; it goes on as it went on"
    lookup.extend([5])
    assert lookup.guess(3) == ()
    circle = Lookup()
    circle.extend([6, 6, 6])
    assert circle.guess(5) == (6,) * 5


def test_what_to_expect_follows_what_came_true():
    lookup = Lookup()
    before = lookup.expected(4)
    assert lookup.expected(0) == 0
    lookup.learn(4, 4)
    assert before < lookup.expected(4) < 4
    for _ in range(30):
        lookup.learn(0, 4)
    assert lookup.expected(4) < 0.01
    for _ in range(10):
        lookup.learn(1, 1)
    assert lookup.expected(4) > before, "guesses that were not fed are learnt from too"
