"""The ranks that the demo starts: they find each other, and none is left behind, whatever ends the job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.process_groups import tree
from nxd_infer.cli.demo.optimizer import MuonAndAdamW, groups_of
from nxd_infer.errors import RankFailedError
from nxd_infer.recipes.rank_processes import run_ranks
from nxd_infer.trainer import load_checkpoint, save_checkpoint
from nxd_infer.util.process_state import process_state
from tests.support.ranks import run_ranks as run_test_ranks
from tests.support.trainer.jobs import training
from tests.support.trainer.models import tokens

SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(total)
open(f"{os.environ['OUT']}/{dist.get_rank()}", "w").write(f"{total.item()} {os.environ['OMP_NUM_THREADS']}")
dist.barrier()
dist.destroy_process_group()
"""
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"{os.environ['OUT']}/{os.environ['RANK']}", "w").write(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not os.path.exists(f"{os.environ['OUT']}/0"): time.sleep(0.01)
    sys.exit("the disk is full")
time.sleep(600)
"""


def test_ranks_find_each_other_by_the_environment(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the user's choice stands
    run_ranks([sys.executable, "-c", SUM], 2, tmp_path / "log", timeout=600)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3.0 1"] * 2


def test_a_failure_ends_the_others(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(RankFailedError, match=r"rank 1 .* status 1(?s:.*)the disk is full") as caught:
        run_ranks([sys.executable, "-c", STUBBORN], 2, tmp_path / "log", timeout=600)
    assert caught.value.rank == 1
    pids = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert [process_state(pid) for pid in pids] == ["ended", "ended"]


def trained_and_resumed(root: str) -> tuple[list[float], list[float]]:
    """The losses of four steps, and of the last two again from a checkpoint between."""
    batch = tokens()
    kinds = {"groups": groups_of, "optimizer_class": MuonAndAdamW}
    model, optimizer = training(**kinds)
    whole: list[float] = []
    for step in range(4):
        if step == 2:
            save_checkpoint(root, "middle", model, optimizer)
        whole.append(model.run_train(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer = training(seed=1, **kinds)
    load_checkpoint(root, model=model, optimizer=optimizer)
    rest: list[float] = []
    for _ in range(2):
        rest.append(model.run_train(**batch).item())
        optimizer.step()
        optimizer.zero_grad()
    return whole, rest


def test_the_optimizer_goes_on_where_it_was(tmp_path: Path):
    for whole, rest in run_test_ranks(trained_and_resumed, 2, str(tmp_path), collectives="shared"):
        assert rest == whole[2:] and whole[3] < whole[2] < whole[1] < whole[0]


def test_ctrl_c_ends_the_demo_with_all_it_started(tmp_path: Path):
    command = [sys.executable, "-m", "nxd_infer.cli.main", "demo", "--dir", str(tmp_path / "demo"), "--seconds", "600"]
    log = tmp_path / "output"
    with log.open("wb") as output:
        demo = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 600
        while "step" not in log.read_text(errors="replace"):  # it trains
            assert demo.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.1)
        started = tree(demo.pid)
        assert len(started) >= 3, "two ranks"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
        assert [process_state(pid) for pid in started] == ["ended"] * len(started)
        assert "Traceback" not in log.read_text()
    finally:
        demo.kill()
        demo.wait()
