"""How a rank waits for its next request: awake for a moment, then asleep."""

from __future__ import annotations

import threading
import time

import pytest

from nxd_infer.trace import channel
from nxd_infer.trace.channel import AWAKE_SECONDS, Channel, Kind, Request

STEP = Request(Kind.STEP, 3, 7)


@pytest.fixture
def ends():
    caller, rank = Channel.pair()
    yield caller, rank
    caller.close()
    rank.close()


@pytest.mark.check
@pytest.mark.parametrize("seconds", [0.0, AWAKE_SECONDS / 4, 4 * AWAKE_SECONDS], ids=["at once", "awake", "asleep"])
def test_a_request_is_received_whenever_it_comes(ends, seconds):
    caller, rank = ends
    sender = threading.Timer(seconds, caller.send_request, [STEP])
    sender.start()
    assert rank.receive_request() == (STEP, [])
    sender.join(10)


@pytest.mark.check
@pytest.mark.parametrize("seconds", [0.0, AWAKE_SECONDS / 4, 4 * AWAKE_SECONDS], ids=["at once", "awake", "asleep"])
def test_the_callers_end_is_noticed_whenever_it_comes(ends, seconds):
    caller, rank = ends
    closer = threading.Timer(seconds, caller.close)
    closer.start()
    assert rank.receive_request() is None
    closer.join(10)


@pytest.mark.check
def test_a_rank_that_nobody_asks_goes_to_sleep(ends):
    """Half a second costs it no more than the moment for which it stays awake, and as much again."""
    caller, rank = ends
    sender = threading.Timer(0.5, caller.send_request, [STEP])
    sender.start()
    begin = time.thread_time()
    assert rank.receive_request() == (STEP, [])
    assert time.thread_time() - begin < AWAKE_SECONDS + 0.05
    sender.join(10)


@pytest.mark.check
def test_a_rank_that_is_asked_soon_stays_awake(ends, monkeypatch):
    monkeypatch.setattr(channel, "AWAKE_SECONDS", 1.0)  # longer, so that what it costs can be told from nothing
    caller, rank = ends
    sender = threading.Timer(0.3, caller.send_request, [STEP])
    sender.start()
    begin = time.thread_time()
    assert rank.receive_request() == (STEP, [])
    assert time.thread_time() - begin > 0.02
    sender.join(10)
