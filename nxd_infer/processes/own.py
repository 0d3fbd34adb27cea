"""What a process arranges for itself: its name, to end with its parent, and to end at once."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

forked = False
"""Whether this is a fork of a fork server (``fork_server.py``), which ends with the process that has started it."""


def name_process(name: str) -> None:
    """Set the name of this process in `ps -e` and `top`: up to 15 bytes."""
    pr_set_name = 15
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_name, name.encode(), 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send ``number`` to this process when the *thread* that started it ends; exit now if it has.

    ``parent`` is the process id of that thread's process. A process that was forked ends with its fork server.
    """
    if forked:
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def ignore_stop() -> None:
    """Ignore the signals that ask a whole group of processes to end: the one that started this one ends it in time."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def leave(status: int) -> NoReturn:
    """Flush the output and end this process without its exit handlers, which could wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
