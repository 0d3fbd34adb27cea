"""Work in a thread that the process does not wait for at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def keep_off(cores: Iterable[int]) -> None:
    """Keep the calling thread off ``cores``, where the process has others."""
    rest = os.sched_getaffinity(os.getpid()) - set(cores)
    if rest:
        with contextlib.suppress(OSError):  # a core was taken away meanwhile
            os.sched_setaffinity(0, rest)


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """``work`` in a daemon thread: should it never return, the process ends all the same."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: list[T], error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result[0])

    def run() -> None:
        result: list[T] = []
        failure = None
        try:
            result.append(work())
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
