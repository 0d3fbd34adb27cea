"""What is read of this machine: its bandwidth, and how far apart its cores are."""

from __future__ import annotations

import math
import os
import subprocess

import pytest

from bench import placement
from bench.model import COMMON
from bench.placement import read_hop
from bench.stream import MEBIBYTES, read_bandwidth


def test_memory_is_read():
    assert 0 < read_bandwidth() < 1e13


def test_no_less_is_read_than_a_step_of_the_common_model_reads():
    hidden, vocab = COMMON["hidden"], COMMON["vocab"]
    keys = hidden * COMMON["kv_heads"] // COMMON["heads"]
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * COMMON["intermediate"]
    assert MEBIBYTES << 20 > 2 * (vocab * hidden + COMMON["layers"] * layer) > 440e6


def test_the_hop_of_this_machine(tmp_path, monkeypatch):
    """Of two cores some tens to hundreds of nanoseconds; of one, none."""
    monkeypatch.setenv("NXD_INFER_BENCH", str(tmp_path))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        assert read_hop() > 5
    os.sched_setaffinity(0, cores[:1])
    try:
        assert read_hop() == 0.0
    finally:
        os.sched_setaffinity(0, cores)
    monkeypatch.setattr(placement, "output", lambda name, **_: subprocess.run(["false"], check=True))
    with pytest.raises(subprocess.CalledProcessError):
        read_hop()
    monkeypatch.setattr(placement, "output", lambda name, **_: subprocess.run(["sleep", "9"], timeout=0.1))
    assert read_hop() == math.inf
