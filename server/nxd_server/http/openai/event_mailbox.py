"""Pass events from the engine's thread to coroutines, with one wake-up of the event loop per step."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any


class Doorbell:
    """Makes an event loop check mailboxes: a step fills one per row, but mostly wakes the loop only once."""

    _of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._rung: deque[Mailbox] = deque()
        self._called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Doorbell:
        return cls._of_loops.setdefault(loop, cls(loop))

    def ring(self, mailbox: Mailbox) -> None:
        """Thread-safe; never blocks, and does nothing once the loop is closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():  # nobody is left to notify
            self._rung.clear()
            return
        self._rung.append(mailbox)
        if self._called:
            return
        self._called = True
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it was closed meanwhile
            self._rung.clear()
        except BaseException:  # the next call tries again
            self._called = False
            raise

    def _answer(self) -> None:
        self._called = False  # first, so that items put from here on ring again
        for _ in range(len(self._rung)):
            self._rung.popleft().wake()


class Mailbox:
    """From the engine's thread to one coroutine, one wake-up for all events that have arrived."""

    def __init__(self) -> None:
        self._bell = Doorbell.of(asyncio.get_running_loop())
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._due = 0.0
        """End of the current wait, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # stored, because a uvloop timer that is nearly due does not report its time

    def put(self, item: Any) -> None:
        """Thread-safe; never blocks, and does nothing once the loop is closed."""
        self._items.append(item)
        self._bell.ring(self)

    def get_nowait(self) -> Any | None:
        return self._items.popleft() if self._items else None

    async def get(self, wait: float) -> Any | None:
        """Return the next item, or ``None`` after ``wait`` seconds. (``asyncio.wait_for`` needs a task per token.)"""
        if not self._items and wait > 0:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + wait
            if self._timer is None or self._timer_due > self._due:  # an earlier timer will find that time is left
                self.close()
                self._look_again(loop)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.get_nowait()

    def close(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """Called in the loop: an item was put."""
        if self._items:  # empty if the item was already taken together with an earlier one
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
