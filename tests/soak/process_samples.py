"""What the system says of the server's processes: memory, descriptors, threads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
GROWTH, SERVER_MIB, RANK_MIB = 0.05, 16, 12
"""Resident memory may grow by this share and so many MiB more, compared with the end of the first round."""
DESCRIPTORS, THREADS = 6, 4
"""So many more descriptors and threads may a process have."""


@dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    memory: int
    """Bytes resident that are its own or shared memory; pages of files come and go as the system likes."""
    descriptors: int
    threads: int
    shared: frozenset[str]
    """Names under /dev/shm that it has mapped."""


def sample(pid: int) -> Sample | None:
    """None when there is no such process (any more)."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    except (OSError, KeyError):  # a process that has ended has no memory
        return None
    shared = frozenset(name for name in mapped if name.startswith("/dev/shm/"))
    return Sample(memory, descriptors, int(fields["Threads"]), shared)


def growth(what: str, before: Sample, now: Sample, mib: int) -> list[str]:
    """What has grown beyond its bound."""
    limit = int(before.memory * (1 + GROWTH)) + mib * MIB
    checks = [
        ("descriptors", before.descriptors, now.descriptors, before.descriptors + DESCRIPTORS),
        ("threads", before.threads, now.threads, before.threads + THREADS),
        ("MiB of memory", before.memory // MIB, now.memory // MIB, limit // MIB),
        ("names under /dev/shm", len(before.shared), len(now.shared), len(before.shared)),
    ]
    return [f"{what} has {now} {of}, {before} before; at most {most}" for of, before, now, most in checks if now > most]
