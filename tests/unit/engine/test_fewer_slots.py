"""An engine that uses fewer slots than were traced, as memory allows: choices wait for one, and answers stay the same.

A slot holds the longest context, so no choice that has begun can run out of room: none is ever ended or begun anew.
"""

from __future__ import annotations

import pytest

from nxd_server.engine import SamplingParams
from tests.support.engine.asking import BOTH_WAYS, ask_all
from tests.support.engine.toy_model import Listener, ToyModel

PROMPTS = [[place + 1, *range(length)] for place, length in enumerate((1, 5, 9, 2, 17, 3, 8))]


@BOTH_WAYS
@pytest.mark.parametrize("slots", [1, 2])
def test_more_requests_than_slots_wait_and_are_answered_alike(engines, slots):
    free = ask_all(engines(), PROMPTS)
    engine = engines(slots=slots)
    seen = set()
    fail = engine.model.fail

    def watch(name, inputs):
        fail(name, inputs)
        seen.update(engine._scheduler.slots._used)

    engine.model.fail = watch
    tight = ask_all(engine, PROMPTS)
    assert [one.tokens for one in tight] == [one.tokens for one in free]
    assert all(one.tokens[0] for one in tight)
    assert seen == set(range(slots)) and engine.stats().slots == slots


def test_no_request_is_promised_more_slots_than_there_are(engines):
    assert engines(slots=99).stats().slots == engines(slots=None).stats().slots == ToyModel().manifest.metadata["slots"]
    listener = Listener(3)
    ticket = engines(slots=1).submit([1, 2], SamplingParams(max_tokens=4, n=3, ignore_eos=True), listener)
    assert ticket.wait(60)
