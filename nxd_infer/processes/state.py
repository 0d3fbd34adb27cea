"""The state of other processes, so that an error can say why a peer is late."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` after the command's name (which may hold spaces).

    None if there is no such process, an empty list if that cannot be read, as where all descriptors are in use.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return []


def process_start(pid: int) -> int:
    """Return the process's start in clock ticks since boot; 0 if unknown. Detects a reused process id.

    Not psutil's ``create_time``, which changes with the system's clock.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and len(fields) > 19 else 0


def process_state(pid: int, start: int = 0) -> Literal["running", "stopped", "ended"]:
    """Return the state; ``ended`` includes zombies and a process id that was reused since ``start``."""
    fields = _stat_fields(pid)
    if fields == []:
        return "running"
    if fields is None or fields[0] in "ZX" or (start and int(fields[19]) != start):
        return "ended"
    return "stopped" if fields[0] in "Tt" else "running"
