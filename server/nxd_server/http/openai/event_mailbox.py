"""Events from the engine's thread to coroutines: a loop is called once for all that a step gave."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any


class Doorbell:
    """Has a loop look into mailboxes: a step fills as many as it has rows, and mostly the loop is called once."""

    _of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._rung: deque[Mailbox] = deque()
        self._called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Doorbell:
        return cls._of_loops.setdefault(loop, cls(loop))

    def ring(self, mailbox: Mailbox) -> None:
        """From any thread; never blocks, and is silent once the loop is gone."""
        loop = self._loop()
        if loop is None or loop.is_closed():  # nobody is left to be told
            self._rung.clear()
            return
        self._rung.append(mailbox)
        if self._called:
            return
        self._called = True
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it was closed just now
            self._rung.clear()
        except BaseException:  # the next one calls again
            self._called = False
            raise

    def _answer(self) -> None:
        self._called = False  # first: what is put from here on rings again
        for _ in range(len(self._rung)):
            self._rung.popleft().wake()


class Mailbox:
    """From the engine's thread to one coroutine, a wake-up for as many events as have come."""

    def __init__(self) -> None:
        self._bell = Doorbell.of(asyncio.get_running_loop())
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._due = 0.0
        """When the present wait is over, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # not asked of the timer: uvloop's, when nearly due, is one that has no time

    def put(self, item: Any) -> None:
        """From any thread; never blocks, and is silent once the loop is gone."""
        self._items.append(item)
        self._bell.ring(self)

    def get_nowait(self) -> Any | None:
        return self._items.popleft() if self._items else None

    async def get(self, wait: float) -> Any | None:
        """The next item, or ``None`` after ``wait`` seconds. (``asyncio.wait_for`` would make a task a token.)"""
        if not self._items and wait > 0:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + wait
            if self._timer is None or self._timer_due > self._due:  # else it will find that there is time left
                self.close()
                self._look_again(loop)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.get_nowait()

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """In the loop: something was put."""
        if self._items:  # a wake-up comes late when its item was taken together with an earlier one
            self._end_wait()

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._look_again(loop)
        else:
            self._end_wait()

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer_due = self._due
        self._timer = loop.call_at(self._due, self._look)

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)
