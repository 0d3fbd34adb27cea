"""Whose turn it is to call a model: one caller at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from nxd_infer.errors import ModelClosedError


class Turns:
    """``with turns:`` is one caller's. Who would wait for itself, or for a thread that a fork left behind, is refused.

    A step of decoding takes a turn, so this is a class: ``contextlib`` would take ten times as long.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.RLock()
        self.busy = False
        """Whether the thread that holds the lock is inside a turn."""
        self.at_end: Callable[[], None] | None = None
        """What a signal handler amid a turn leaves to be done at its end."""

    def __enter__(self) -> None:
        if os.getpid() != self.owner:
            raise ModelClosedError(
                f"the ranks of this model belong to process {self.owner}; "
                "a forked process must load the artifact itself"
            )
        self.lock.acquire()
        if self.busy:
            self.lock.release()
            raise ModelClosedError("the model was used by a signal handler in the middle of one of its calls")
        self.busy = True

    def __exit__(self, *_: object) -> None:
        self.busy = False
        try:
            at_end, self.at_end = self.at_end, None
            if at_end is not None:
                at_end()
        finally:
            self.lock.release()
