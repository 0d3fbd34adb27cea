"""Run work in daemon threads, which the process does not wait for when it exits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nxd_infer.errors import NxdError
from nxd_server.errors import forget_frames

T = TypeVar("T")
IDLE_SECONDS = 5.0
"""How long a thread waits for more work before it exits."""


def keep_off(cores: Iterable[int]) -> None:
    """Keep the calling thread off ``cores``, if the process has others."""
    rest = os.sched_getaffinity(os.getpid()) - set(cores)
    if rest:
        with contextlib.suppress(OSError):  # a core was taken away meanwhile
            os.sched_setaffinity(0, rest)


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``work`` in a daemon thread, so that the process can exit even if it never returns."""
    run, future = _job(work)
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Workers:
    """Daemon threads that are reused: starting one per job takes longer than most jobs."""

    def __init__(self, most: int, name: str):
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._most = most
        self._name = name
        self._lock = threading.Lock()
        self._threads = 0
        self._open = 0

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Run ``work`` in an idle thread, or as soon as one is free. Call from the event loop's thread only.

        Raises RuntimeError if there is no thread, and the system has none to spare.
        """
        job, future = _job(work)
        with self._lock:
            if self._threads < min(self._open + 1, self._most):
                try:
                    threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                    self._threads += 1
                except RuntimeError:
                    if not self._threads:
                        raise
            self._jobs.put(job)
        self._open += 1
        future.add_done_callback(self._ended)
        return future

    def _serve(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():  # no job arrived meanwhile
                        self._threads -= 1
                        return
            else:
                job()
                del job

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._open -= 1


def _job(work: Callable[[], T]) -> tuple[Callable[[], None], asyncio.Future[T]]:
    """Return what a thread must call, and the future that the event loop's thread awaits."""
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
            if isinstance(error, NxdError):  # its frames hold the work, and the future holds the error
                forget_frames(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is waiting
            loop.call_soon_threadsafe(settle, result, failure)

    return run, future
