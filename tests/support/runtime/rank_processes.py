"""Models of the toy artifact with ranks of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from nxd_infer.runtime.model import TensorParallelModel, parallel_model_load
from tests.support import toy_artifacts as toy
from tests.support.processes import wait_until

TIMEOUT = 1.0
"""Of calls whose rank is stopped, and never goes on."""
LIMIT = 60.0
"""Of all others: it guards against hanging, however busy the machine is."""

X = torch.zeros(1, 1, toy.HIDDEN)


def started(path: Path, call_timeout: float = LIMIT, **options) -> TensorParallelModel:
    return parallel_model_load(path, call_timeout=call_timeout, start_timeout=600, **options).start()


def until_busy(model: TensorParallelModel, rank: int) -> None:
    """Until ``rank`` is in the middle of a step."""
    wait_until(lambda: model.health()[rank].busy_seconds > 0)


def interrupt_the_wait(number: int = signal.SIGINT) -> None:
    """Send this process a signal once its main thread waits for the answers of ranks, which all have their record."""

    def names() -> list[str]:
        frame, found = sys._current_frames().get(threading.main_thread().ident or 0), []
        while frame is not None:
            found.append(frame.f_code.co_name)
            frame = frame.f_back
        return found

    def interrupt() -> None:
        wait_until(lambda: "_collect" in names())
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()


@contextlib.contextmanager
def raising(number: int) -> Iterator[None]:
    """A signal raises KeyboardInterrupt, whatever has handled it before."""
    before = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def until_stopped(model: TensorParallelModel, rank: int) -> None:
    """Until a rank that was sent SIGSTOP has stopped."""
    wait_until(lambda: model.health()[rank].state == "stopped")


def pids_of(model: TensorParallelModel) -> list[int]:
    return [rank.pid for rank in model.health() if rank.pid is not None]


def call_in_thread(model: TensorParallelModel, *inputs: torch.Tensor) -> tuple[threading.Thread, list]:
    result: list = []

    def run() -> None:
        try:
            result.append(model(*inputs))
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, result
