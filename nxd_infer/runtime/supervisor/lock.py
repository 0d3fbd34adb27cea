"""The lock of a model: one caller at a time."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from nxd_infer.errors import ModelClosedError
from nxd_infer.runtime.supervisor import failures


class CallLock:
    """``with lock.take():`` makes the caller the only one. Raises if it would wait for itself, or for a thread that
    does not exist in a forked process.

    Returns the lock itself as context manager, so that it is released whatever a signal handler raises.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.RLock()

    def take(self) -> AbstractContextManager[object]:
        if os.getpid() != self.owner:
            raise failures.of_another_process(self.owner)
        if self.lock._is_owned():  # type: ignore[attr-defined]  # like threading.Condition
            raise ModelClosedError("the model was used by a signal handler in the middle of one of its calls")
        return self.lock
