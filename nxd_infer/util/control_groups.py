"""The control groups of this process, in which the kernel reports a container's limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
