"""From the engine's thread to coroutines: nothing is lost, no wait is too long, one call of the loop is enough."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref

import pytest

from nxd_server.http.openai.event_mailbox import Doorbell, Mailbox

SOON, LATE = 0.05, 600.0


def run(scene):
    return asyncio.run(asyncio.wait_for(scene(), 60))


def test_items_of_many_threads_come_once_and_in_order():
    async def scene() -> None:
        boxes = [Mailbox() for _ in range(8)]

        def fill(box: Mailbox) -> None:
            for number in range(500):
                box.put(number)

        async def drain(box: Mailbox) -> list[int]:
            return [await box.get(LATE) for _ in range(500)]

        threads = [threading.Thread(target=fill, args=(box,)) for box in boxes]
        for thread in threads:
            thread.start()
        assert await asyncio.gather(*map(drain, boxes)) == [list(range(500))] * len(boxes)
        assert all(box.get_nowait() is None for box in boxes)
        for thread in threads:
            thread.join(60)

    run(scene)


def test_a_wait_ends_when_its_time_is_over_and_not_before():
    async def scene() -> None:
        box = Mailbox()
        assert await box.get(0) is None
        for wait in (LATE, SOON, 2 * SOON):  # an earlier end than the timer's, and a later one
            if wait == LATE:
                asyncio.get_running_loop().call_later(SOON, box.put, "item")
            begin = time.monotonic()
            found = await box.get(wait)
            passed = time.monotonic() - begin
            assert found == ("item" if wait == LATE else None)
            assert wait == LATE or passed >= 0.9 * wait  # `run` bounds the other one
        box.put("next")
        assert await box.get(LATE) == "next"
        box.close()

    run(scene)


@pytest.mark.parametrize("late", [False, True], ids=["idle", "called while it ended"])
def test_a_loop_that_has_ended_is_told_nothing_and_kept_by_nobody(late):
    async def scene() -> tuple[Mailbox, weakref.ref, weakref.ref]:
        box = Mailbox()
        loop = asyncio.get_running_loop()
        return box, weakref.ref(Doorbell.of(loop)), weakref.ref(loop)

    loop = asyncio.new_event_loop()
    box, bell, ended = loop.run_until_complete(scene())
    if late:
        box.put(1)  # the loop never looks again
    loop.close()
    del loop
    for _ in range(3):
        box.put(2)
    assert box.get_nowait() == (1 if late else 2)
    assert not bell()._rung
    gc.collect()
    assert ended() is None
    del box
    gc.collect()
    assert bell() is None
