"""A benchmark's processes are ended with everything that they started, wherever it went."""

from __future__ import annotations

import sys

from bench.process_groups import Group, tree
from tests.support.processes import gone

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
    assert all(gone(pid, 120) for pid in started)
