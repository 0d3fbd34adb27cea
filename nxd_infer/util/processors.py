"""How much processor time the process may use: its affinity, its cores, its container's share."""

from __future__ import annotations

import os
from pathlib import Path

from nxd_infer.errors import ParallelConfigError
from nxd_infer.util.control_groups import GROUPS, MOUNTS, control_groups

_QUOTA_FILES = {1: ["cpu.cfs_quota_us", "cpu.cfs_period_us"], 2: ["cpu.max"]}
"""By version of control groups."""
_TOPOLOGY = Path("/sys/devices/system/cpu")


def available_cores() -> list[int]:
    """Return the logical cores that this process's main thread may run on; other threads may be limited to fewer."""
    return sorted(os.sched_getaffinity(os.getpid()))


def physical_core(core: int, topology: Path = _TOPOLOGY) -> str:
    """Return the logical cores that share a physical core with ``core``, as the kernel writes them: ``"0,8"``."""
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second name is for Linux before 5.3
        try:
            return (topology / f"cpu{core}" / "topology" / name).read_text().strip()
        except OSError:
            continue
    return str(core)


def processor_share(groups: Path = GROUPS, mounts: Path = MOUNTS) -> float:
    """Return the cores' worth of time that this process's control groups grant; infinity without a limit.

    ``docker run --cpus 2`` and a Kubernetes limit set such a quota: the container sees every core, but once its threads
    have together used the quota, all are stopped for the rest of each 100 ms.

    Source: the kernel's cgroup-v2 (``cpu.max``) and CFS bandwidth control (``cpu.cfs_quota_us``) documents.
    """
    shares = (
        _quota([group / name for name in _QUOTA_FILES[version]])
        for version, group in control_groups("cpu", groups, mounts)
    )
    return min(shares, default=float("inf"))


def _quota(files: list[Path]) -> float:
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else float("inf")
    except (OSError, ValueError, ZeroDivisionError):  # no such group, or "max"
        return float("inf")


def processors() -> int:
    """Return how many threads may run at once: the logical cores, or the container's share of them if smaller."""
    return max(1, int(min(len(available_cores()), processor_share())))


def compute_threads() -> int:
    """Return how many threads compute at full speed: one per physical core, at most :func:`processors`."""
    return min(len({physical_core(core) for core in available_cores()}), processors())


def check_degree(degree: int) -> None:
    """Raise ParallelConfigError for more ranks than this machine can reasonably hold.

    The limit is 64, or 8 per core if that is more; ``NXD_INFER_MAX_RANKS`` overrides it.
    """
    cores, setting = len(available_cores()), os.environ.get("NXD_INFER_MAX_RANKS", "")
    limit, why = (
        (int(setting), "NXD_INFER_MAX_RANKS") if setting.isdigit() else (max(64, 8 * cores), "64, or 8 per core")
    )
    if degree > limit:
        raise ParallelConfigError(
            f"a degree of {degree} means {degree} processes on this machine of {cores} cores; at most {limit} are "
            f"started ({why}). Use a smaller degree, or set NXD_INFER_MAX_RANKS={degree} if that is meant"
        )
