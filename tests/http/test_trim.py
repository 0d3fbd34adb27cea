"""Memory goes back once: some time after the last of several large bodies."""

from __future__ import annotations

import asyncio

from nxd_server import trim


def test_several_requests_in_a_row_are_one_trim_after_the_last(monkeypatch):
    calls: list[int] = []
    problems: list[dict] = []
    ended = asyncio.Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, problem: problems.append(problem))

        def give_back() -> None:
            calls.append(len(scheduled))
            loop.call_soon_threadsafe(ended.set)

        scheduled: list[float] = []
        monkeypatch.setattr(trim, "give_back", give_back)
        monkeypatch.setattr(trim, "TRIM_SECONDS", 0.05)
        for _ in range(3):
            trim.trim_soon()
            scheduled.append(loop.time())
        await asyncio.wait_for(ended.wait(), 60)
        await asyncio.sleep(0.2)  # another one would come within this time

    asyncio.run(run())
    assert calls == [3] and not problems
    assert not trim._waiting
