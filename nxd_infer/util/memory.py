"""How much memory this process may use, and uses: the machine's, or its container's limit if smaller."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_infer.util.machine import GROUPS, MOUNTS, control_groups

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 20
"""Blocks of at least this size are mapped separately: larger than any read of a socket."""
_MOST = 32 << 20
"""The largest threshold that glibc takes."""

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""By version of control groups: the files of the limit and of the usage, and the lines of ``memory.stat`` with the size
of file pages, which are dropped if memory is short."""


def total_memory(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Return the bytes of the machine, or the lowest limit of this process's control groups."""
    return min([_machine().total, *(limit for limit, _ in _limits(groups, mounts))])


def available_memory(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Return the bytes that can be allocated without swapping or exceeding a container's limit."""
    return max(0, min([_machine().available, *(limit - held for limit, held in _limits(groups, mounts))]))


def _machine() -> Any:
    import psutil  # slow: as long as the rest of this package, so a server starts without it

    return psutil.virtual_memory()


def held_memory(process: int | str = "self") -> int | None:
    """Return the bytes that a process holds and the system cannot reclaim: private and shared memory, not file pages.

    Shared memory is divided among its users, so that processes can be summed; psutil's ``pss`` includes file pages.
    None if the system does not report it.
    """
    fields = _fields(Path(f"/proc/{process}/smaps_rollup"))
    return fields["Pss_Anon:"] + fields.get("Pss_Shmem:", 0) if "Pss_Anon:" in fields else None


def keep_little() -> None:
    """Make the C library return large blocks as soon as they are freed, in any thread; call at a process's start.

    By default it adapts to what is freed, and keeps up to 64 MiB per thread, which :func:`give_back` cannot release.
    """
    _keep(_LARGE, 2 * _LARGE)


def keep_much() -> None:
    """Make the C library keep what is freed, up to half a GiB, for what is allocated next; call at a process's start.

    A step allocates the same blocks again and again. Given back in between, their pages are cleared each time: a
    twentieth of the time of a prompt of 512 tokens.
    """
    _keep(_MOST, 16 * _MOST)


def _keep(separate: int, rest: int) -> None:
    """Map blocks of ``separate`` bytes or more one by one; give back what is free at the end once it is ``rest``."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, separate)
        mallopt(_M_TRIM_THRESHOLD, rest)


def give_back() -> None:
    """Return freed memory that the C library keeps to the system, for example between a rank's tensors."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _limits(groups: Path, mounts: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes held that cannot be dropped) of every control group that has a limit."""
    for version, group in control_groups("memory", groups, mounts):
        limit, used, droppable = _FILES[version]
        try:
            bound, current = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        held = _fields(group / "memory.stat")
        yield bound, max(0, current - sum(held.get(line, 0) for line in droppable))


def _fields(file: Path) -> dict[str, int]:
    """Read a file of lines ``name number`` or ``name number kB``, in bytes; other lines are ignored."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {
        words[0]: int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }
