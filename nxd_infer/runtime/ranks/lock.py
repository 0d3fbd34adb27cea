"""Whose turn it is to call a model: one caller at a time."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from nxd_infer.errors import ModelClosedError


class Turns:
    """``with turns.take():`` is one caller's. Who would wait for itself, or for a thread that a fork left behind, is
    refused.

    The lock itself is what is entered: it is taken and given back whatever a signal handler raises meanwhile.
    """

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.RLock()

    def take(self) -> AbstractContextManager[object]:
        if os.getpid() != self.owner:
            raise ModelClosedError(
                f"the ranks of this model belong to process {self.owner}; "
                "a forked process must load the artifact itself"
            )
        if self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise ModelClosedError("the model was used by a signal handler in the middle of one of its calls")
        return self.lock
