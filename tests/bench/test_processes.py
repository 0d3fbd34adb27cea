"""A benchmark's processes are ended with everything that they started, wherever it went."""

from __future__ import annotations

import sys

import pytest

from bench.processes import Group, tree
from tests.processes import wait_until

pytestmark = pytest.mark.check

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


def alive(pid: int) -> bool:
    """A zombie that nobody has waited for yet is not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
