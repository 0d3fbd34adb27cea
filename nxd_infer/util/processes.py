"""The state of other processes, so that an error can say why a peer is late; also: end with the parent, set a name."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Literal


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` after the command's name (which may hold spaces), or None."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def process_start(pid: int) -> int:
    """Return the process's start in clock ticks since boot; 0 if unknown. Detects a reused process id.

    Not psutil's ``create_time``, which changes with the system's clock.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def process_state(pid: int, start: int = 0) -> Literal["running", "stopped", "ended"]:
    """Return the state; ``ended`` includes zombies and a process id that was reused since ``start``."""
    fields = _stat_fields(pid)
    if fields is None:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "ended"
        except PermissionError:
            return "running"
        return "running"
    if fields[0] in "ZX" or (start and int(fields[19]) != start):
        return "ended"
    return "stopped" if fields[0] in "Tt" else "running"


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
