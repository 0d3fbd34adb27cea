"""How a rank waits for its next request: awake for a moment, then asleep."""

from __future__ import annotations

import os
import threading
import time

from nxd_infer.runtime.ipc import AWAKE_SECONDS, Channel, Kind, Request
from tests.support.processes import wait_until


def test_a_rank_that_nobody_asks_goes_to_sleep(monkeypatch):
    caller, rank = Channel.pair()
    yields, received = [], []
    sched_yield = os.sched_yield
    monkeypatch.setattr(os, "sched_yield", lambda: (yields.append(None), sched_yield()))
    thread = threading.Thread(target=lambda: received.append(rank.receive_request()))
    thread.start()

    def sleeps():
        before = len(yields)
        time.sleep(20 * AWAKE_SECONDS)
        return len(yields) == before

    wait_until(sleeps)
    assert yields and not received
    caller.send(Request(Kind.STEP, 3, 7).record())
    thread.join(60)
    assert received == [(Request(Kind.STEP, 3, 7), [])]
    caller.close()
    assert rank.receive_request() is None
    rank.close()
