"""Choose the cores to which the ranks of this process's models are pinned.

Two unpinned compute threads beside a busy process went from 3-8 ms to 128 ms per step, so ranks are pinned if the
machine has a core for every thread of every rank. Models divide the cores among themselves: those of one process by
counts, those of other processes of the same user by locked files. If a container's quota limits time instead of a set
of cores, its neighbours would choose the same cores: then the kernel places the ranks, as with ``NXD_INFER_PIN=0``.
"""

from __future__ import annotations

import collections
import fcntl
import os
import threading

from nxd_infer.util.core_locks import lock_core
from nxd_infer.util.machine import available_cores, compute_threads, physical_core, processor_share

_lock = threading.RLock()  # reentrant: a signal handler may close a model while its thread is in here
_used: collections.Counter[int] = collections.Counter()
_leads: collections.Counter[int] = collections.Counter()  # number of ranks whose first thread is on the core
_claims: dict[int, int] = {}  # core -> descriptor of its locked file


def choose_cores(ranks: int, threads: int) -> list[list[int]]:
    """Return the cores of each rank, none twice. Empty lists mean "not pinned".

    Prefers cores that no model uses, then one per physical core, then high numbers, because low ones serve the system.
    The first core of a rank, for its first thread, is the first core of as few other ranks as possible.
    """
    cores = available_cores()
    needed = ranks * threads
    pinned = os.environ.get("NXD_INFER_PIN", "1") != "0" and processor_share() >= len(cores)
    if needed > len(cores) or not pinned:
        return [[] for _ in range(ranks)]
    seen: collections.Counter[str] = collections.Counter()
    siblings: dict[int, int] = {}  # number of earlier cores on the same physical core
    for core in reversed(cores):
        physical = physical_core(core)
        siblings[core] = seen[physical]
        seen[physical] += 1
    with _lock:
        ordered = sorted(cores, key=lambda core: (_used[core], siblings[core], -core))
        chosen: list[int] = []
        others: list[int] = []  # cores that another process has
        for core in ordered:
            if len(chosen) < needed:
                (chosen if _claim(core) else others).append(core)
        chosen += [core for core in ordered if core not in chosen][: needed - len(chosen)]
        _used.update(chosen)
        groups = [chosen[rank * threads : (rank + 1) * threads] for rank in range(ranks)]
        for group in groups:
            if set(group) <= set(others):
                group.reverse()  # start its ranks at the other end
            lead = min(group, key=lambda core: _leads[core])
            group.remove(lead)
            group.insert(0, lead)
            _leads[lead] += 1
    return groups


def release_cores(cores: list[list[int]]) -> None:
    """Release the cores returned by :func:`choose_cores`."""
    with _lock:
        _leads.subtract(group[0] for group in cores if group)
        for core in (core for group in cores for core in group):
            _used[core] -= 1
            if not _used[core] and core in _claims:
                fcntl.flock(_claims[core], fcntl.LOCK_UN)  # closing alone would leave the lock to a forked process
                os.close(_claims.pop(core))


def _claim(core: int) -> bool:
    """Claim a core until it is released or this process ends; False if another process of this user has it."""
    if core in _claims:
        return True
    try:
        descriptor = lock_core("cores", core)
    except OSError:  # coordination is not possible
        return True
    if descriptor is None:
        return False
    _claims[core] = descriptor
    return True


def default_threads(ranks: int, recorded: object = None) -> int:
    """Return threads per rank: what the graphs were compiled for, else an equal share of the machine, at least 1."""
    if isinstance(recorded, int) and recorded > 0:
        return recorded
    return max(1, compute_threads() // ranks)
