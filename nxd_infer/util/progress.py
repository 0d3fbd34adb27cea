"""Progress of long work, as a callback: ``progress(stage, done, total, note)``. The command line draws it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol


class Progress(Protocol):
    """Called from the working thread, in order; stages follow one another, and ``done`` never decreases within one."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None:
        """``stage`` says what is done, such as ``compile graphs``; a ``total`` of 0 is an unknown one."""
        ...


def silent(stage: str, done: int, total: int, note: str = "") -> None:
    """Report nothing."""


def counted(progress: Progress, stage: str, total: int) -> Callable[[], None]:
    """Return what reports one more of the ``total`` steps of a stage each time it is called."""
    steps = itertools.count(1)
    return lambda: progress(stage, next(steps), total)
