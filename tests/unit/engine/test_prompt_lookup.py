"""Guesses from the text itself, against a search from scratch; when they are fed, and what is kept of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.engine.scheduler import Row, Step
from nxd_server.engine.speculation import RETRY, RUNS, Lookup, Speculation, room
from nxd_server.engine.step_runner import Graph
from tests.support.engine.schedules import sequence


def searched(text: list[int], count: int) -> tuple[int, ...]:
    """The tokens after the latest earlier occurrence of the last 3 tokens, else of the last 2, read cyclically."""
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
    lookup.draft(count)
    lookup.extend(text[cut:])
    assert lookup.draft(count) == searched(text, count)[:count]


def test_expectations_follow_what_came_true():
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


PLAIN, VERIFYING = Graph("decode_b2", 2, 1), Graph("verify_b2", 2, 5)
ENDLESS = SamplingParams(max_tokens=100, temperature=0)


def decode_step(*texts):
    """A step for sequences of these prompts, each with its last token as its answer so far."""
    rows = []
    for number, text in enumerate(texts):
        one = sequence(number, text[:-1], 100, ENDLESS, output=text[-1:])
        rows.append(Row(one, len(text) - 1, 1, True))
    return Step("decode", PLAIN, tuple(rows))


def test_guesses_are_fed_where_they_pay_and_now_and_then_to_see_whether_they_would():
    costs = {PLAIN.name: 1.0, VERIFYING.name: 3.0}
    speculation = Speculation([VERIFYING], 4, costs)  # pyright: ignore[reportArgumentType]
    step = decode_step([7] * 9, [1, 2, 3])
    graphs = [speculation.put(step).graph for _ in range(2 * RETRY)]
    assert graphs == [*[PLAIN] * (RETRY - 1), VERIFYING] * 2
    costs[VERIFYING.name] = 1.3
    fed = speculation.put(step)
    assert fed.graph == VERIFYING
    assert [row.tokens() for row in fed.rows] == [[7] * 5, [3]], "a row without a guess feeds its last token"
    lone = decode_step([1, 2, 3], [4, 5])
    assert speculation.put(lone) is lone, "no guess, no graph that verifies"
    prefill = Step("prefill", VERIFYING, step.rows)
    assert speculation.put(prefill) is prefill


@pytest.mark.parametrize(("tokens", "kept"), [([7, 7, 7, 7, 7], 5), ([7, 7, 3, 7, 7], 3), ([3, 7, 7, 7, 7], 1)])
def test_what_was_right_is_kept_up_to_the_first_difference(tokens, kept):
    speculation = Speculation([VERIFYING], 4, {PLAIN.name: 1.0, VERIFYING.name: 1.0})  # pyright: ignore[reportArgumentType]
    fed = speculation.put(decode_step([7] * 9))
    lookup = speculation.lookup(fed.rows[0].sequence)
    before = lookup.rate
    row = speculation.settle(fed.rows[0], tokens)
    assert row.length == kept and (speculation.drafted, speculation.accepted) == (4, kept - 1)
    assert (lookup.rate > before) == (kept > 1)


@pytest.mark.parametrize(
    ("params", "made", "expected"),
    [
        (ENDLESS, 0, 4),
        (ENDLESS, 96, 3),
        (ENDLESS, 99, 0),
        (ENDLESS.replace(min_tokens=10), 7, 2),
        (ENDLESS.replace(min_tokens=10), 10, 4),
        (ENDLESS.replace(presence_penalty=0.1), 0, 0),
    ],
)
def test_no_more_is_guessed_than_one_step_can_answer(params, made, expected):
    assert room(sequence(1, [1], 100, params, output=[2] * made), 4) == expected
