"""Which cores the ranks of this process's models keep to.

Two unpinned compute threads beside a busy process went from 3-8 ms a step to 128 ms, so ranks are pinned when the
machine has a core for every thread of every rank. Models share the cores out among themselves: those of one process by
count, those of other processes of the same user by locked files. Where a container's quota limits the process and not a
set of cores, its neighbours would choose the same ones: there the kernel places the ranks, as with ``NXD_INFER_PIN=0``.
"""

from __future__ import annotations

import collections
import fcntl
import os
import tempfile
import threading
from pathlib import Path

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.processors import available_cores, compute_threads, physical_core, processor_share

_lock = threading.RLock()  # a signal handler may close a model while its thread is in here
_used: collections.Counter[int] = collections.Counter()
_leads: collections.Counter[int] = collections.Counter()  # ranks whose first thread has the core
_claims: dict[int, int] = {}  # core -> descriptor of its locked file


def choose_cores(ranks: int, threads: int) -> list[list[int]]:
    """The cores of each rank, none twice. Empty lists mean "not pinned".

    First those that no model uses, then one of each physical core, then high numbers: low ones serve the system. The
    first core of a rank, which its first thread keeps to, is one that is the first of as few others as possible.
    """
    cores = available_cores()
    needed = ranks * threads
    pinned = os.environ.get("NXD_INFER_PIN", "1") != "0" and processor_share() >= len(cores)
    if needed > len(cores) or not pinned:
        return [[] for _ in range(ranks)]
    seen: collections.Counter[str] = collections.Counter()
    siblings: dict[int, int] = {}  # of the same physical core that come before it
    for core in reversed(cores):
        physical = physical_core(core)
        siblings[core] = seen[physical]
        seen[physical] += 1
    with _lock:
        ordered = sorted(cores, key=lambda core: (_used[core], siblings[core], -core))
        chosen: list[int] = []
        others: list[int] = []  # that another process has
        for core in ordered:
            if len(chosen) < needed:
                (chosen if _claim(core) else others).append(core)
        chosen += [core for core in ordered if core not in chosen][: needed - len(chosen)]
        _used.update(chosen)
        groups = [chosen[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
        for group in groups:
            if set(group) <= set(others):
                group.reverse()  # its ranks begin at the other end
            lead = min(group, key=lambda core: _leads[core])
            group.remove(lead)
            group.insert(0, lead)
            _leads[lead] += 1
    return groups


def release_cores(cores: list[list[int]]) -> None:
    """Give back what :func:`choose_cores` returned."""
    with _lock:
        _leads.subtract(group[0] for group in cores if group)
        for core in (core for group in cores for core in group):
            _used[core] -= 1
            if not _used[core] and core in _claims:
                fcntl.flock(_claims[core], fcntl.LOCK_UN)  # closing alone leaves it to a process that was forked
                os.close(_claims.pop(core))


def _begin_anew() -> None:
    """In a process that was forked: what its parent has is another's."""
    global _lock
    _lock = threading.RLock()  # another thread may have had it
    for found in _claims.values():
        os.close(found)  # without unlocking, which would be for the parent too
    _claims.clear()
    _used.clear()
    _leads.clear()


os.register_at_fork(after_in_child=_begin_anew)


def _claim(core: int) -> bool:
    """Whether no other process of this user has the core; it is ours until released, or until this process ends."""
    if core in _claims:
        return True
    try:
        folder = Path(tempfile.gettempdir()) / f"nxd-infer-cores-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(place).st_uid != os.getuid():
                return True  # somebody else's: no place to agree
            found = os.open(str(core), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=place)
        finally:
            os.close(place)
    except OSError:
        return True
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(found)
        return False
    _claims[core] = found
    return True


def check_degree(degree: int) -> None:
    """Raise ParallelConfigError for more ranks than this machine can be meant to hold.

    The limit is 64, or 8 a core where that is more; ``NXD_INFER_MAX_RANKS`` sets another.
    """
    given = os.environ.get("NXD_INFER_MAX_RANKS", "")
    limit = int(given) if given.isdigit() else max(64, 8 * len(available_cores()))
    if degree > limit:
        raise ParallelConfigError(
            f"a degree of {degree} means {degree} processes on this machine of {len(available_cores())} cores; at most "
            f"{limit} are started ({'NXD_INFER_MAX_RANKS' if given.isdigit() else '64, or 8 a core'}). Use a smaller "
            f"degree, or set NXD_INFER_MAX_RANKS={degree} if that is meant"
        )


def default_threads(ranks: int, recorded: object = None) -> int:
    """Threads of each rank: what the graphs were compiled for, else an equal part of what computes here, at least 1."""
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    return max(1, compute_threads() // ranks)
