"""Between threads and the event loop: work in daemon threads, which the process does not wait for when it exits; and
what the engine's thread tells a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from nxd_infer.errors import NxdError
from nxd_server.errors import EngineUnavailableError, QueueFullError, forget_frames

T = TypeVar("T")
MOST_ASIDE = 4096
"""Jobs that may wait for their turn in a thread, if no setting says how many: as many as connections."""


def keep_off(cores: Iterable[int]) -> None:
    """Keep the calling thread off ``cores``, if the process has others."""
    rest = os.sched_getaffinity(os.getpid()) - set(cores)
    if rest:
        with contextlib.suppress(OSError):  # a core was taken away meanwhile
            os.sched_setaffinity(0, rest)


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread, so that the process can exit even if it never returns."""
    future: Future[T] = Future()
    threading.Thread(target=settle, args=(future, work), name=name, daemon=True).start()
    return asyncio.wrap_future(future)


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Return the results of all ``calls``, each made in a daemon thread. Raises the error of one that failed."""
    futures: list[Future[T]] = [Future() for _ in calls]
    for call, future in zip(calls[1:], futures[1:], strict=True):
        threading.Thread(target=settle, args=(future, call), name="nxd-at-once", daemon=True).start()
    if calls:
        settle(futures[0], calls[0])
    wait(futures)
    return [future.result() for future in futures]


def settle(future: Future[T], work: Callable[[], T]) -> None:
    """Do ``work``, unless ``future`` was cancelled, and give it what came of that."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        if isinstance(error, NxdError):  # its frames hold the work, and the future holds the error
            forget_frames(error)
        future.set_exception(error)


class ConcurrencyLimit:
    """Up to ``width`` jobs run at a time, each in a thread, which stays for the next; ``queue`` more may wait, or
    :data:`MOST_ASIDE`. Only for the event loop's thread."""

    def __init__(self, what: str, width: int, queue: int | None):
        self._what = what
        self._most = width + (MOST_ASIDE if queue is None else queue)
        self._turns = asyncio.Semaphore(width)
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._threads = self._running = 0
        self.inside = 0

    async def run(self, work: Callable[[], T], cancel: Callable[[], None] | None = None) -> T:
        """Run ``work()``. If this call is cancelled, waiting work is dropped, and ``cancel`` ends running work.

        Raises QueueFullError when there is no room to wait, EngineUnavailableError if no thread can be started.
        """
        if self.inside >= self._most:
            raise QueueFullError(f"{self.inside} {self._what} are being worked on or wait (max_queued_requests)")
        self.inside += 1
        try:
            await self._turns.acquire()
        except BaseException:
            self.inside -= 1
            raise
        self._running += 1
        future: Future[T] = Future()
        running = asyncio.wrap_future(future)
        running.add_done_callback(self._ended)
        try:
            if self._threads < self._running:
                threading.Thread(target=self._serve, name="nxd-text", daemon=True).start()
                self._threads += 1
        except RuntimeError as error:
            if not self._threads:  # else it waits for one of them
                running.cancel()
                raise EngineUnavailableError(f"no thread could be started: {error}", "busy", 1.0) from None
        self._jobs.put(functools.partial(settle, future, work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            raise

    def _serve(self) -> None:
        while True:
            self._jobs.get()()

    def _ended(self, work: asyncio.Future[Any]) -> None:
        """Free the turn when the work ends, not when its caller stops waiting."""
        self.inside -= 1
        self._running -= 1
        self._turns.release()
        if not work.cancelled():
            work.exception()  # mark it retrieved, even if nobody waits


# --- events from the engine's thread, with one wake-up of the event loop per step ---


class Doorbell:
    """Makes an event loop look into mailboxes: a step fills one per row, but mostly wakes the loop only once."""

    def __init__(self) -> None:
        self._rung: deque[Mailbox] = deque()
        self._called = False

    def ring(self, mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        """Thread-safe; never blocks, and does nothing once the loop is closed."""
        self._rung.append(mailbox)
        if not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._answer)
            except BaseException:
                self._called = False  # the next call tries again
                if not loop.is_closed():
                    raise
                self._rung.clear()  # nobody is left to notify

    def _answer(self) -> None:
        self._called = False  # first, so that items put from here on ring again
        for _ in range(len(self._rung)):
            self._rung.popleft().wake()


class Mailbox:
    """From the engine's thread to one coroutine, one wake-up for all events that have arrived."""

    def __init__(self, bell: Doorbell) -> None:
        self._bell, self._loop = bell, asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._due = self._timer_due = 0.0
        """End of the current wait, and of the timer's, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Any) -> None:
        """Thread-safe; never blocks, and does nothing once the loop is closed."""
        self._items.append(item)
        self._bell.ring(self, self._loop)

    def get_nowait(self) -> Any | None:
        return self._items.popleft() if self._items else None

    async def get(self, wait: float) -> Any | None:
        """Return the next item, or ``None`` after ``wait`` seconds. (``asyncio.wait_for`` needs a task per token.)"""
        if not self._items and wait > 0:
            self._due = self._loop.time() + wait
            if self._timer is None or self._due < self._timer_due:  # an earlier timer will find that time is left
                self.close()
                self._look_again()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.get_nowait()

    def wake(self) -> None:
        """Called in the loop: an item was put."""
        if self._items:  # empty if the item was already taken together with an earlier one
            self._end_wait()

    def close(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_again(self) -> None:
        self._timer_due, self._timer = self._due, self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is not None and self._loop.time() < self._due:
            self._look_again()
        else:
            self._end_wait()

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
