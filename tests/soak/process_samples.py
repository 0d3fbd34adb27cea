"""What the system says of the server's processes: memory, descriptors, threads, and whether any is left."""

from __future__ import annotations

import os
import re
from collections import Counter
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
    descriptors: Counter[str]
    """By what they are."""
    threads: int
    shared: frozenset[str]
    """Names under /dev/shm that it holds."""


def sample(pid: int) -> Sample | None:
    """None when there is no such process (any more)."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
        links = [_link(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
        mapped = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    except (OSError, KeyError):  # a process that has ended has no memory
        return None
    shared = frozenset(name for name in (*links, *mapped) if name.startswith("/dev/shm/"))
    kinds = Counter(re.sub(r"\d+", "", link) for link in links)
    return Sample(memory, kinds, int(fields["Threads"]), shared)


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def growth(what: str, before: Sample, now: Sample, mib: int) -> list[str]:
    """What has grown beyond its bound."""
    descriptors = before.descriptors.total(), now.descriptors.total()
    limit = int(before.memory * (1 + GROWTH)) + mib * MIB
    checks = [
        ("descriptors", *descriptors, descriptors[0] + DESCRIPTORS),
        ("threads", before.threads, now.threads, before.threads + THREADS),
        ("MiB of memory", before.memory // MIB, now.memory // MIB, limit // MIB),
        ("names under /dev/shm", len(before.shared), len(now.shared), len(before.shared)),
    ]
    found = [
        f"{what} has {now} {of}, {before} before; at most {most}" for of, before, now, most in checks if now > most
    ]
    return [*found, f"new descriptors: {dict(now.descriptors - before.descriptors)}"] if found else []
