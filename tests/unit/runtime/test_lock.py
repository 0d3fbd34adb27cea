"""One caller at a time, whatever a signal handler does in the middle of it."""

from __future__ import annotations

import random
import signal
import threading

import pytest

from nxd_infer.errors import ModelClosedError
from nxd_infer.runtime.supervisor.lock import CallLock


class Interrupted(Exception):
    pass


def test_a_handler_that_raises_at_any_moment_leaves_the_turn_free():
    def raises(*_):
        raise Interrupted

    turns, draw = CallLock(), random.Random(0)
    before = signal.signal(signal.SIGALRM, raises)
    try:
        for _ in range(3000):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 4e-5))
                for _ in range(40):
                    with turns.take():
                        pass
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                pass
            assert not turns.lock._is_owned()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_turn_within_a_turn_is_refused_and_another_thread_waits():
    turns, order = CallLock(), []

    def other():
        with turns.take():
            order.append("other")

    with turns.take():
        with pytest.raises(ModelClosedError, match="in the middle of one of its calls"):
            turns.take()
        thread = threading.Thread(target=other)
        thread.start()
        order.append("first")
    thread.join(120)
    assert order == ["first", "other"]
