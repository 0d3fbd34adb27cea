"""Is that process still there? Asked when a peer is late, so that an error can say why. And: end with one's parent,
and have a name."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Literal


def _stat_fields(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` after the command's name (which may hold spaces), or None."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def process_start(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when unknown. Tells a reused process id apart.

    Not psutil's ``create_time``, which moves with the system's clock.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def process_state(pid: int, start: int = 0) -> Literal["running", "stopped", "ended"]:
    """``ended`` covers zombies and a process id that another process has taken over since ``start``."""
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
    """What `ps -e` and `top` call this process: up to 15 bytes."""
    pr_set_name = 15
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_name, name.encode(), 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process by SIGKILL when the *thread* that started it ends; end now if it has.

    ``parent`` is the process id of the starter.
    """
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
