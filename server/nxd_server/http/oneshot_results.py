"""Wait for one-shot results: all of a request's futures, its client, and its deadline at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from starlette.requests import Request

from nxd_server.errors import DEADLINE_GRACE, ended_early
from nxd_server.http.request_context import unless_left

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
        results = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        try:
            return await unless_left(request, results, timeout + DEADLINE_GRACE)
        except (asyncio.CancelledError, CancelledError):
            if results.done():  # cancelled by the engine, not by this task's canceller
                raise ended_early() from None
            raise
    finally:
        for future in futures:
            future.cancel()
