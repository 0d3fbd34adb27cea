"""A benchmark's processes are ended with everything that they started, wherever it went."""

from __future__ import annotations

import sys

from bench.process_groups import Group, Peak, tree
from tests.support.processes import wait_until

STARTER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def test_a_child_in_a_session_of_its_own_does_not_outlive_its_group(tmp_path):
    with Group([sys.executable, "-c", STARTER], tmp_path / "log", pipes=True) as group:
        assert group.stdout.readline() == b"started\n"
        started = tree(group.pid)
    assert len(started) == 2
    wait_until(lambda: not any(alive(pid) for pid in started))


HOLDER = """
import mmap, subprocess, sys
kept = []
for file in sys.argv[1:]:
    child = subprocess.Popen([sys.executable, sys.argv[0]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    with open(file, "rb") as source:
        pages = mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)
    kept += [child, pages, sum(pages[:: mmap.PAGESIZE])]
private = bytearray(b"x") * (64 << 20)
shared = mmap.mmap(-1, 32 << 20)
shared.write(b"x" * (32 << 20))
print("held", flush=True)
sys.stdin.readline()
"""


def test_what_processes_hold_is_private_and_shared_memory_without_files(tmp_path):
    """Of two readings in a row the lower one counts."""
    (tmp_path / "file").write_bytes(b"y" * (48 << 20))
    (tmp_path / "holder.py").write_text(HOLDER)
    peak = Peak()
    with Group(
        [sys.executable, str(tmp_path / "holder.py"), str(tmp_path / "file")], tmp_path / "log", pipes=True
    ) as group:
        assert group.stdout.readline() == b"held\n"
        peak(group.pid)
        assert peak.held == 0
        peak(group.pid)
    assert 2 * 96 << 20 <= peak.held <= (2 * 96 + 40) << 20
    assert peak.with_files >= peak.held + (40 << 20)


def alive(pid: int) -> bool:
    """A zombie that nobody has waited for yet is not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
