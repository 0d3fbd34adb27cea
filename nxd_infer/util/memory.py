"""How much memory this process may use, and holds: of the machine, or its container's limit where that is less."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nxd_infer.util.control_groups import GROUPS, MOUNTS, control_groups

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE = 1 << 20
"""Bytes that the system is asked for by themselves: more than any read of a socket."""

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""Of each version of control groups: the file of the limit, that of what is used, and the lines of ``memory.stat`` that
say how much of it are pages of files, which are dropped where memory is short."""


def total_memory(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Bytes of the machine, or the least that a control group of this process may hold."""
    return min([_machine().total, *(limit for limit, _ in _limits(groups, mounts))])


def available_memory(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Bytes that can be had without swapping, and without being killed for a container's limit."""
    return max(0, min([_machine().available, *(limit - held for limit, held in _limits(groups, mounts))]))


def _machine() -> Any:
    import psutil  # a server's start does without: it takes as long as the rest of this package

    return psutil.virtual_memory()


def held_memory(process: int | str = "self") -> int | None:
    """Bytes that a process holds and the system cannot take back: private and shared memory, without pages of files.

    What it shares is divided among those who do, so that processes can be summed; psutil's ``pss`` counts pages of
    files too. None where the system does not say.
    """
    fields = _fields(Path(f"/proc/{process}/smaps_rollup"))
    return fields["Pss_Anon:"] + fields.get("Pss_Shmem:", 0) if "Pss_Anon:" in fields else None


def keep_little() -> None:
    """Have the C library return what is large as soon as it is freed, in whatever thread; for the start of a process.

    By itself it learns from what is freed, and keeps up to 64 MiB a thread, which :func:`give_back` does not reach.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


def give_back() -> None:
    """Return to the system what was freed and the C library keeps: between the tensors of a rank's weight file, say."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _limits(groups: Path, mounts: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes held that cannot be dropped) of every control group that has a limit."""
    for version, group in control_groups("memory", groups, mounts):
        limit, used, droppable = _FILES[version]
        try:
            bound, current = int((group / limit).read_text()), int((group / used).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        held = _fields(group / "memory.stat")
        yield bound, max(0, current - sum(held.get(line, 0) for line in droppable))


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file of lines ``name number`` or ``name number kB``, in bytes; other lines are passed over."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {
        words[0]: int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }
