"""The soak's own tasks: run them together, end them, and say what each waits for."""

from __future__ import annotations

import asyncio
import contextlib
import time
import traceback
from collections.abc import Awaitable, Iterator
from typing import Any


async def all_of(*works: Awaitable[Any]) -> None:
    """Until all have ended; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(*tasks)


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel them until all have ended. Once is not enough: before Python 3.12 ``asyncio.wait_for`` returns an answer
    that comes at the same moment instead, and its caller goes on for ever."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1.0)
    await asyncio.gather(*tasks, return_exceptions=True)  # what they failed of has been told, or comes of this


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Have the current task's name say so meanwhile."""
    task = asyncio.current_task()
    assert task is not None
    name = task.get_name()
    task.set_name(f"{name}, {what} since {time.strftime('%X')}")
    try:
        yield
    finally:
        task.set_name(name)


def waiting() -> str:
    """Every task that has not ended, and at which lines; without tasks, this thread's."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return "".join(traceback.format_stack())  # no task runs
    lines = []
    for task in tasks:
        coroutine, places = task.get_coro(), []
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            coroutine = getattr(coroutine, "cr_await", None)
        lines.append(f"{task.get_name()}: {' > '.join(places)}")
    return f"at {time.strftime('%X')} these wait:\n" + "\n".join(sorted(lines))
