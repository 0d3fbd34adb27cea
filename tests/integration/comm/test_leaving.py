"""A program that ends by an error shows that error, not an abort of gloo's threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading
import torch.distributed as dist

def last():  # registered first, so it runs last
    print("left" if not dist.is_initialized() else "still there", threading.active_count())

atexit.register(last)
rank, store, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
import nxd_infer as nxd

from nxd_infer.comm import distributed

nxd.parallel_state.initialize_model_parallel(2, timeout=300)
distributed.LEAVE_SECONDS = 0.5 if ending == "stuck" else 300.0
if ending == "stuck":
    import torch
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)  # the other rank is there and never takes part
    else:
        sys.stdin.read()  # until rank 0 has ended
if ending == "done":
    from nxd_infer.trainer import shutdown
    shutdown()
else:
    raise FileNotFoundError("wrong path")
"""


def ends(tmp_path: Path, ending: str) -> list[tuple[int, str, str]]:
    """Status, output and errors of two ranks."""
    command = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), ending],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *texts) for rank, texts in zip(ranks, found, strict=True)]


@pytest.mark.parametrize(("ending", "status"), [("error", 1), ("done", 0)])
def test_threads_of_gloo_have_ended_before_the_interpreter_does(tmp_path, ending, status):
    for code, output, errors in ends(tmp_path, ending):
        ours = [line for line in output.splitlines() if not line.startswith("[Gloo]")]  # as some releases greet
        assert (code, ours) == (status, ["left 1"]), errors
        assert ("FileNotFoundError: wrong path" in errors) == (status == 1)


def test_a_collective_that_nobody_waits_for_does_not_keep_the_process(tmp_path):
    """``ends`` waits for rank 0 first, and at most some minutes; gloo would wait for half an hour."""
    for _, _, errors in ends(tmp_path, "stuck"):
        assert "FileNotFoundError: wrong path" in errors
