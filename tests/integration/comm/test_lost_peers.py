"""A peer that dies, stops or does something else ends in an error that names it, in time, on every other rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from nxd_infer.comm import all_gather, all_reduce, barrier
from nxd_infer.context import current_context
from nxd_infer.errors import CollectiveError, CollectiveTimeoutError
from tests.support.processes import wait_until
from tests.support.ranks import run_ranks


def lose(victim: int) -> tuple:
    """Work together, then lose a rank; what the others see: message, missing ranks, and those of the next call."""
    here = current_context()
    for _ in range(3):
        all_reduce(torch.ones(5), here)
    barrier(here)
    if here.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        all_reduce(torch.ones(5), here)
    except CollectiveTimeoutError as error:
        try:
            all_gather(torch.ones(2), here)
        except CollectiveTimeoutError as again:
            return str(error), error.ranks, str(again), again.ranks
    return ()


def test_shared_memory_names_a_lost_peer_and_stays_failed():
    """The end of a process is noticed, not waited out: the call would have ended before the limit."""
    results = run_ranks(lose, 4, 2, collectives="shm", comm_timeout=600.0, lost=(2,))
    for rank in (0, 1, 3):
        message, ranks, again, ranks_again = results[rank]
        assert message.startswith("nxd: rank(s) [2] did not reach all_reduce (number 5 on axis 'tp', called by rank ")
        assert "within 600.0 s" in message and "the process has ended" in message
        assert ranks == ranks_again == (2,)
        assert again == message, "the next call does not wait again"


def test_distributed_names_a_lost_peer_and_stays_failed():
    message, ranks, again, ranks_again = run_ranks(lose, 2, 1, comm_timeout=600.0, lost=(1,))[0]
    assert message.startswith("nxd: rank(s) [1] (pid ") and "has ended" in message
    assert ranks == ranks_again == (1,) and again == message


def late(folder: str) -> tuple:
    """Rank 1 is alive and well, but never comes in time; afterwards it finds the group failed."""
    here = current_context()
    if here.rank == 1:
        wait_until((Path(folder) / "over").exists)
    try:
        all_reduce(torch.ones(3), here)
    except CollectiveTimeoutError as error:
        (Path(folder) / "over").touch()
        return str(error), error.ranks
    return ()


def test_a_late_peer_finds_the_failure_instead_of_mixing_data(tmp_path):
    first, second = run_ranks(late, 2, str(tmp_path), collectives="shm", comm_timeout=1.0)
    assert first == second and first[1] == (1,) and "within 1" in first[0] and "has ended" not in first[0]


def disagree(kind: str) -> str:
    here = current_context()
    odd = here.rank == 1
    try:
        if kind == "operation":
            (all_gather if odd else all_reduce)(torch.ones(3), here)
        elif kind == "size":
            all_reduce(torch.ones(4 if odd else 3), here)
        else:
            all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32), here)
    except CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_that_go_apart_get_an_error_instead_of_each_others_data():
    for kind in ("operation", "size", "dtype"):
        first, second = run_ranks(disagree, 2, kind, collectives="shm")
        assert first.startswith("CollectiveError: nxd: the ranks of axis 'tp' went apart") and first == second
