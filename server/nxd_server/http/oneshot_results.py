"""Wait for one-shot results: all of a request's futures, its client, and its deadline at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive

from nxd_server.errors import DEADLINE_GRACE, ended_early, not_finished
from nxd_server.http.request_body import ClientLeft, client_left
from nxd_server.http.request_context import Context, context_of

T = TypeVar("T")


async def wait_all(request: Request, submit: Sequence[Callable[[], Future[T]]], *, timeout: float) -> list[T]:
    """Submit all calls or none, and wait for all results.

    Args:
        submit: each queues one call.
        timeout: seconds in total.

    Raises:
        ClientLeft: the connection closed; calls that were not running yet are cancelled.
        NxdError: a call failed, or the deadline passed.
    """
    futures: list[Future[T]] = []
    try:
        for one in submit:
            futures.append(one())
        return await _wait(request.receive, futures, timeout, context_of(request))
    finally:
        for future in futures:
            future.cancel()


async def _wait(receive: Receive, futures: list[Future[T]], timeout: float, context: Context) -> list[T]:
    results = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
    watcher = asyncio.create_task(client_left(receive))
    try:
        await asyncio.wait({results, watcher}, timeout=timeout + DEADLINE_GRACE, return_when=asyncio.FIRST_COMPLETED)
        if results.done():
            return results.result()
        if watcher.done():
            context.metrics.disconnected()
            raise ClientLeft
        raise not_finished(context.settings.request_timeout)
    except (asyncio.CancelledError, CancelledError):
        if results.done():  # cancelled by the engine, not by this task's canceller
            raise ended_early() from None
        raise
    finally:
        watcher.cancel()
        results.cancel()
