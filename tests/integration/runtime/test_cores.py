"""Cores that processes of one user claim: each takes its own, and one that ends holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nxd_infer.runtime.supervisor import cores
from nxd_infer.util.machine import available_cores, processor_share
from tests.support.runtime.machines import machine as machine
from tests.support.runtime.rank_processes import X, pids_of, started

HOLDER = """
import sys
from nxd_infer.runtime.supervisor import cores
cores.available_cores = lambda: [0, 1, 2, 3]
cores.processor_share = lambda: float("inf")
cores.physical_core = str
print(cores.choose_cores(1, 2), flush=True)
sys.stdin.readline()
"""


def test_processes_of_one_user_take_different_cores(machine, tmp_path):
    machine(4, "alone")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "[[3, 2]]\n"
        mine = cores.choose_cores(1, 2)
        assert mine == [[1, 0]]
        assert cores.choose_cores(1, 3) == [[0, 1, 3]]  # its own before another's, and another one first
        cores.release_cores(mine)
        other.kill()
        other.wait(60)
    assert cores.choose_cores(2, 1) == [[2], [3]]  # a process that died holds nothing
    assert cores._used == {0: 1, 1: 1, 2: 1, 3: 2}


def test_ranks_keep_to_their_cores_and_ignore_ctrl_c(path, monkeypatch):
    monkeypatch.delenv("NXD_INFER_PIN", raising=False)
    if len(available_cores()) < 2 or processor_share() < len(available_cores()):
        pytest.skip("needs two cores, and the time of all that there are")
    with started(path) as model:
        used = [os.sched_getaffinity(pid) for pid in pids_of(model)]
        assert all(len(group) == 1 for group in used)
        assert used[0] != used[1]
        for pid in pids_of(model):
            os.kill(pid, signal.SIGINT)
        assert model(X)["count"].item() == 1
