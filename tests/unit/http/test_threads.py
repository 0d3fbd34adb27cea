"""Work beside the loop: threads that stay for the next piece of it, and never more than they may be; and what a thread
tells coroutines."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest

from nxd_server.errors import EngineUnavailableError
from nxd_server.threads import ConcurrencyLimit, Doorbell, Mailbox

refuse = Mock(side_effect=RuntimeError("can't start new thread"))


def test_there_are_no_more_threads_than_allowed_and_what_waits_is_done():
    gate, begun = threading.Event(), []

    def work():
        begun.append(threading.get_ident())
        gate.wait(120)

    async def main():
        limit = ConcurrencyLimit("texts", 2, 3)
        several = [asyncio.create_task(limit.run(work)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert len(begun) <= 2
        gate.set()
        await asyncio.gather(*several)

    asyncio.run(main())
    assert len(begun) == 5 and len(set(begun)) <= 2


def test_a_thread_that_cannot_be_started_takes_no_turn_with_it(monkeypatch):
    async def main():
        limit = ConcurrencyLimit("texts", 2, 4)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with pytest.raises(EngineUnavailableError, match="no thread"):
                    await asyncio.wait_for(limit.run(lambda: 1), 120)
        assert limit.inside == 0
        return await asyncio.wait_for(limit.run(lambda: 7), 120)

    assert asyncio.run(main()) == 7


def test_items_of_many_threads_come_once_and_in_order():
    async def main():
        boxes = [Mailbox(bell) for bell in [Doorbell()] * 8]

        def fill(box):
            for number in range(500):
                box.put(number)

        async def drain(box):
            return [await box.get(600) for _ in range(500)]

        threads = [threading.Thread(target=fill, args=(box,)) for box in boxes]
        for thread in threads:
            thread.start()
        assert await asyncio.gather(*map(drain, boxes)) == [list(range(500))] * len(boxes)
        assert await boxes[0].get(0.01) is None
        for thread in threads:
            thread.join(60)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_wait_ends_when_its_time_is_over_and_not_before():
    """Whether the timer of an earlier wait ends later or sooner."""

    async def main():
        box, loop = Mailbox(Doorbell()), asyncio.get_running_loop()
        loop.call_later(0.05, box.put, "item")
        assert await box.get(600) == "item"
        for seconds in (0.05, 0.1):
            begun = loop.time()
            assert await box.get(seconds) is None
            assert loop.time() - begun >= 0.9 * seconds
        box.put("next")
        assert await box.get(600) == "next"
        box.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_loop_that_has_ended_is_told_nothing():
    async def main():
        return Mailbox(Doorbell())

    box = asyncio.run(main())
    for number in range(3):
        box.put(number)
    assert box.get_nowait() == 0


def test_a_loop_that_could_not_be_told_once_is_told_by_the_next():
    async def main():
        box, loop = Mailbox(Doorbell()), asyncio.get_running_loop()
        told = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = Mock(side_effect=MemoryError)  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(MemoryError):
            box.put("first")
        loop.call_soon_threadsafe = told
        assert box.get_nowait() == "first"
        waiting = asyncio.create_task(box.get(600))
        await asyncio.sleep(0)
        box.put("second")
        return await waiting

    assert asyncio.run(asyncio.wait_for(main(), 60)) == "second"
