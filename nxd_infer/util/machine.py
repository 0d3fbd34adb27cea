"""This machine: its architecture, CPU features and library versions, and how much of the processor the process may use:
its affinity, its cores, its container's share."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from nxd_infer.errors import ParallelConfigError


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the CPU feature names in ``/proc/cpuinfo`` (``avx2``, ...); empty without such a file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


def computes_bfloat16() -> bool:
    """Whether the processor has instructions for bfloat16, without which products are many times slower in it; where
    nothing tells, it is taken to have them."""
    features = cpu_features()
    return not features or not features.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})  # the last is Arm's


def architecture() -> str:
    """Return ``x86_64``, ``aarch64``, ..."""
    return platform.machine()


def torch_version() -> str:
    """The version of torch that is installed here, without importing it."""
    known = getattr(sys.modules.get("torch"), "__version__", None)  # another thread may be in the middle of its import
    return _installed_torch() if known is None else str(known)


@functools.cache
def _installed_torch() -> str:
    """As ``torch.__version__`` has it: the package's own version lacks the ``+cu128`` of some builds."""
    installed = importlib.metadata.distribution("torch")
    try:
        text = Path(str(installed.locate_file("torch/version.py"))).read_text(encoding="utf-8")
    except OSError:
        return installed.version
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return installed.version if match is None else match[1]


def torch_minor(version: str) -> str:
    """``"2.13.0+cpu"`` -> ``"2.13"``: the part of torch's version that compiled graphs depend on."""
    return ".".join(version.split("+")[0].split(".")[:2])


def versions() -> dict[str, str]:
    """Return ``manifest.versions`` for this machine, which traces."""
    return {"torch": torch_version(), "python": platform.python_version()}


# --- what this process may use of it ------------------------------------------------------------------

GROUPS = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")


def control_groups(controller: str, groups: Path = GROUPS, mounts: Path = MOUNTS) -> Iterator[tuple[int, Path]]:
    """Yield (version, directory) of every group in which ``controller`` counts this process: its own, and all above.

    Each of them sets limits. A directory may be missing: the path may be the host's, while the mount shows the
    container's own groups.

    Source: the kernel's documents cgroup-v1 and cgroup-v2, and cgroups(7).
    """
    try:
        lines = groups.read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0" and not controllers:
            version, roots = 2, [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            version, roots = 1, [mounts / controllers, mounts / controller]
        else:
            continue
        own = Path(path.lstrip("/"))
        for root in dict.fromkeys(roots):
            for group in (own, *own.parents):
                yield version, root / group


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
