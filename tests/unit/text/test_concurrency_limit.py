"""Work beside the loop: threads that stay for the next piece of it, and never more than they may be."""

from __future__ import annotations

import asyncio
import threading
from unittest.mock import Mock

import pytest

from nxd_server.errors import EngineUnavailableError
from nxd_server.text.concurrency_limit import ConcurrencyLimit
from nxd_server.threads import Workers

refuse = Mock(side_effect=RuntimeError("can't start new thread"))


def test_there_are_no_more_threads_than_allowed_and_what_waits_is_done():
    gate, begun = threading.Event(), []

    def work():
        begun.append(threading.get_ident())
        gate.wait(120)

    async def main():
        workers = Workers(2, "worker")
        several = [workers.run(work) for _ in range(5)]
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
