"""How a rank waits for its next request: awake for a moment, then asleep."""

from __future__ import annotations

import os
import threading
import time

import pytest

from nxd_infer.runtime.ipc.channel import AWAKE_SECONDS, Channel, Kind, Request
from tests.support.processes import wait_until

STEP = Request(Kind.STEP, 3, 7)


@pytest.fixture
def ends():
    caller, rank = Channel.pair()
    yield caller, rank
    caller.close()
    rank.close()


@pytest.fixture
def yields(monkeypatch) -> list[None]:
    """One for each time that the rank, awake, left its core to others."""
    found: list[None] = []
    sched_yield = os.sched_yield
    monkeypatch.setattr(os, "sched_yield", lambda: (found.append(None), sched_yield()))
    return found


def test_a_rank_that_nobody_asks_goes_to_sleep(ends, yields):
    caller, rank = ends
    received = []
    thread = threading.Thread(target=lambda: received.append(rank.receive_request()))
    thread.start()

    def sleeps():
        before = len(yields)
        time.sleep(20 * AWAKE_SECONDS)
        return len(yields) == before

    wait_until(sleeps)
    assert not received
    caller.send(STEP.record())
    thread.join(60)
    assert received == [(STEP, [])]
