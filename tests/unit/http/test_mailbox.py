"""From the engine's thread to coroutines: nothing is lost, no wait is too long, one call of the loop is enough."""

from __future__ import annotations

import asyncio
import threading
import time

from nxd_server.http.openai.generation import Mailbox

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


def test_a_loop_that_has_ended_is_told_nothing():
    async def scene() -> Mailbox:
        return Mailbox()

    box = asyncio.run(scene())
    for number in range(3):
        box.put(number)
    assert box.get_nowait() == 0
