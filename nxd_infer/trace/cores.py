"""Which cores the ranks of this process's models keep to.

Two unpinned compute threads beside a busy process went from 3-8 ms a step to 128 ms, so ranks are pinned when the
machine has a core for every thread of every rank. Models of one process share the cores out among themselves.
``NXD_INFER_PIN=0`` leaves the placement to the kernel.
"""

from __future__ import annotations

import collections
import os
import threading

from nxd_infer.errors import ParallelConfigError

_lock = threading.RLock()  # a signal handler may close a model while its thread is in here
_used: collections.Counter[int] = collections.Counter()


def available_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def choose_cores(ranks: int, threads: int) -> list[list[int]]:
    """The cores of each rank: the least used first, high numbers first, none twice. Empty lists mean "not pinned"."""
    cores = available_cores()
    needed = ranks * threads
    if needed > len(cores) or os.environ.get("NXD_INFER_PIN", "1") == "0":
        return [[] for _ in range(ranks)]
    with _lock:
        chosen = sorted(cores, key=lambda core: (_used[core], -core))[:needed]
        _used.update(chosen)
    return [chosen[rank * threads : (rank + 1) * threads] for rank in range(ranks)]


def release_cores(cores: list[list[int]]) -> None:
    """Give back what :func:`choose_cores` returned."""
    with _lock:
        for core in (core for group in cores for core in group):
            _used[core] -= 1


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
    """Threads of each rank: what the graphs were compiled for, else an equal share of the cores, at least 1."""
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    return max(1, len(available_cores()) // ranks)
