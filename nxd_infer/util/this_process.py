"""What a child process arranges for itself: its name, and to end with its parent."""

from __future__ import annotations

import ctypes
import os
import signal


def name_process(name: str) -> None:
    """Set the name of this process in `ps -e` and `top`: up to 15 bytes."""
    pr_set_name = 15
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_name, name.encode(), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the *thread* that started it ends; exit now if it has.

    ``parent`` is the process id of that thread's process.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
