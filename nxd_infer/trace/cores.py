"""Which cores the ranks of this process's models keep to.

Two unpinned compute threads beside a busy process went from 3-8 ms a step to 128 ms, so ranks are pinned when the
machine has a core for every thread of every rank. Models of one process share the cores out among themselves.
``NXD_INFER_PIN=0`` leaves the placement to the kernel.
"""

from __future__ import annotations

import collections
import os
import threading

_lock = threading.Lock()
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


def default_threads(ranks: int, recorded: object = None) -> int:
    """Threads of each rank: what the graphs were compiled for, else an equal share of the cores, at least 1."""
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    return max(1, len(available_cores()) // ranks)
