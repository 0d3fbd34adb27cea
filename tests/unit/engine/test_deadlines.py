"""Which tickets are late, and that those that are done are forgotten."""

from __future__ import annotations

import gc
import weakref

from nxd_server.engine.deadlines import Deadlines
from nxd_server.engine.request import Ticket


def ticket(timeout: float | None) -> Ticket:
    made = Ticket("request", lambda event: None, timeout, lambda ticket: None)
    made.open = 1
    return made


def test_it_is_time_to_look_when_one_is_late_or_done():
    now = 5.0
    deadlines = Deadlines(lambda: now)
    deadlines.add(ticket(None))
    assert not deadlines.due
    first, second = ticket(100.0), ticket(200.0)
    deadlines.add(second)
    deadlines.add(first)
    assert not deadlines.due and deadlines.take_late() == []
    first.close_one()
    assert deadlines.due  # else its prompt and its answer would be kept until its deadline
    deadlines.take_late()
    assert not deadlines.due
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None
    late = ticket(10.0)
    deadlines.add(late)
    assert not deadlines.due and deadlines.wait_seconds() == 10
    now = 15.0
    assert deadlines.due and deadlines.take_late() == [late] and deadlines.wait_seconds() == 190
