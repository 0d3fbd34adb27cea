"""How much memory a process may use: files of control groups of both kinds, limits above limits, none at all."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from nxd_infer.util.memory import available_memory, total_memory

KIB, MIB = 1 << 10, 1 << 20
MEMINFO = "MemTotal: 8192 kB\nMemFree: 1024 kB\nMemAvailable: 6144 kB\nHugePages_Total: 0" + "".join(
    f"\n{name}: 0 kB" for name in ("Buffers", "Cached", "Shmem", "Active", "Inactive")
)


def v2(group: str, limit: object, current: object = 0, stat: str = "") -> dict[str, str]:
    names = {"memory.max": str(limit), "memory.current": str(current), "memory.stat": stat}
    return {f"sys/{group}{name}": text for name, text in names.items()}


def v1(group: str, limit: object, usage: object = 0, stat: str = "") -> dict[str, str]:
    names = {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(usage), "memory.stat": stat}
    return {f"sys/memory/{group}{name}": text for name, text in names.items()}


@pytest.mark.parametrize(
    ("groups", "files", "total", "available"),
    [
        ("0::/", {}, 8192, 6144),
        ("0::/", v2("", "max", 5000 * KIB), 8192, 6144),
        ("0::/", v2("", 4 * MIB, MIB), 4096, 3072),
        # Pages of files are dropped before anything is killed; other memory is not.
        ("0::/", v2("", 4 * MIB, 3 * MIB, f"anon {MIB}\ninactive_file {MIB}\nactive_file {MIB}"), 4096, 3072),
        ("0::/", v2("", 2 * MIB, 3 * MIB), 2048, 0),
        # The lower limit counts, whichever group it is on, and what its other groups hold counts against it.
        ("0::/pod/app", v2("pod/", 3 * MIB, 2 * MIB) | v2("pod/app/", "max", MIB), 3072, 1024),
        ("0::/pod/app", v2("pod/", 7 * MIB, 6 * MIB) | v2("pod/app/", 2 * MIB, MIB), 2048, 1024),
        ("0::/pod/app", v2("pod/", 4 * MIB, 3584 * KIB) | v2("pod/app/", 2 * MIB, MIB), 2048, 512),
        # More than the machine has is no limit.
        ("0::/", v2("", 64 * MIB, MIB), 8192, 6144),
        ("4:memory:/", v1("", 9223372036854771712, MIB), 8192, 6144),
        ("4:memory:/a", v1("a/", 4 * MIB, 2 * MIB, f"total_inactive_file {MIB}\ninactive_file 7"), 4096, 3072),
        ("4:memory:/a/b", v1("a/", 4 * MIB, MIB) | v1("a/b/", 5 * MIB, MIB), 4096, 3072),
        # The path of the host, which the container does not see: its own group is what is mounted.
        ("4:memory:/docker/7f\n0::/", v1("", 4 * MIB, MIB), 4096, 3072),
        ("1:cpuset:/a\n0::/x", v2("unified/x/", MIB, 0), 1024, 1024),
        ("0::/", {"sys/memory.max": "what"}, 8192, 6144),
    ],
)
def test_the_least_that_machine_and_control_groups_grant(tmp_path, monkeypatch, groups, files, total, available):
    for name, text in {"cgroup": groups, "meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    where = tmp_path / "cgroup", tmp_path / "sys"
    assert total_memory(*where) == total * KIB
    assert available_memory(*where) == available * KIB


def test_this_machine_has_what_it_says():
    lines = Path("/proc/meminfo").read_text().splitlines()
    whole = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal:")) * KIB
    assert 0 < available_memory() <= total_memory() <= whole
