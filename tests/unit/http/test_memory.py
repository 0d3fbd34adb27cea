"""What a refused request held is free when it has been answered; memory goes back to the system once, soon after."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from unittest.mock import AsyncMock, Mock

import pytest

from nxd_server.errors import RequestError
from nxd_server.http.error_responses import ApiError
from nxd_server.http.keys import Keys
from nxd_server.http.request_context import RequestMiddleware
from nxd_server.settings import ServerSettings
from nxd_server.threads import ConcurrencyLimit


class Body:
    """Stands for megabytes."""


async def refused(body):
    raise ApiError(413, "too large")


async def refused_in_a_lane(body):
    def work():
        held = body  # as the frames do of what asks a process
        raise RequestError("prompt", f"{type(held).__name__} is too long")

    await ConcurrencyLimit("bodies", 1, 1).run(work)


@pytest.mark.parametrize("handler", [refused, refused_in_a_lane])
def test_what_a_refused_request_held_is_free_once_it_is_answered(handler):
    kept: list[weakref.ref[Body]] = []
    receive, send = AsyncMock(return_value={"type": "http.request"}), AsyncMock()

    async def app(scope, receive, send):
        body = Body()
        kept.append(weakref.ref(body))
        await handler(body)

    async def main():
        settings = ServerSettings(access_log=False)
        middleware = RequestMiddleware(app, Mock(keys=Keys(settings), settings=settings))
        scope = {"type": "http", "headers": [], "path": "/x", "method": "POST", "http_version": "1.1"}
        await middleware(scope, receive, send)
        end = time.monotonic() + 60
        while kept[0]() is not None and time.monotonic() < end:  # until the thread of a lane lets go of its work
            await asyncio.sleep(0.01)
        assert kept[0]() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
    assert send.await_args_list[0].args[0]["status"] in (400, 413)
