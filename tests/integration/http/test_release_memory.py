"""Memory goes back once: some time after the last of several large bodies."""

from __future__ import annotations

import asyncio

import pytest

from nxd_infer.errors import CheckpointError
from nxd_server.http import release_memory
from nxd_server.http.admin.update_weights import unchanged
from nxd_server.http.error_responses import ApiError


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
        monkeypatch.setattr(release_memory, "give_back", give_back)
        monkeypatch.setattr(release_memory, "TRIM_SECONDS", 0.05)
        for _ in range(3):
            release_memory.trim_soon()
            scheduled.append(loop.time())
        await asyncio.wait_for(ended.wait(), 60)
        await asyncio.sleep(0.2)  # another one would come within this time
        assert loop not in release_memory._waiting

    asyncio.run(run())
    assert calls == [3] and not problems


def test_what_new_weights_took_is_given_back_whether_or_not_they_are_used():
    """The pieces of a model that was not swapped in after all stayed with the server."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        with unchanged("nothing happened", "weights"):
            pass
        release_memory._waiting.pop(loop).cancel()
        with pytest.raises(ApiError), unchanged("nothing happened", "weights"):
            raise CheckpointError("no such file")
        release_memory._waiting.pop(loop).cancel()

    asyncio.run(run())
