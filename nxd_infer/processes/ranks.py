"""Start one process per rank, with the environment that torchrun would set, and leave none behind."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from nxd_infer.errors import RankFailedError, RankTimeoutError
from nxd_infer.processes.child import ChildProcess, end_all, end_of_log, wait_for_an_end
from nxd_infer.processes.command import child_environment
from nxd_infer.util.machine import compute_threads

STOP_TIMEOUT = 3.0
"""Seconds that a rank has to restore the terminal before it is killed."""
LOOK_SECONDS = 60.0
"""How long one wait for an end may take, in a run without a time limit."""


def run_ranks(command: Sequence[str], world_size: int, log: Path | None, timeout: float | None) -> None:
    """Run ``command`` once per rank and wait for all. Rank 0 prints to this terminal; all else goes to ``log``, or to
    this terminal, too.

    Raises RankFailedError with the end of the log as soon as a rank exits with a status other than 0, and
    RankTimeoutError after ``timeout`` seconds; None: they may train for as long as they like, and end by themselves if
    one of them is lost. No rank is left running, even after Ctrl-C.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # slow

    deadline = math.inf if timeout is None else time.monotonic() + timeout
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # lives as long as the ranks
    environment = {
        "OMP_NUM_THREADS": str(max(1, compute_threads() // world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        **child_environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    ranks: list[ChildProcess] = []
    with contextlib.nullcontext() if log is None else log.open("wb") as output:
        try:
            for rank in range(world_size):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                stdout = None if rank == 0 else output
                ranks.append(ChildProcess(command, environment=own, stdout=stdout, stderr=output))
            while running := [rank for rank in ranks if rank.running]:
                left = deadline - time.monotonic()
                if not wait_for_an_end(running, min(left, LOOK_SECONDS)) and left <= LOOK_SECONDS:
                    told = "" if log is None else f"; their log is {log}"
                    raise RankTimeoutError(f"the ranks have not ended after {timeout or 0:g} s{told}")
                _raise_first_failure(ranks, log)
            _raise_first_failure(ranks, log)
        finally:
            end_all(ranks, patience=STOP_TIMEOUT)
            del store


def _raise_first_failure(ranks: Sequence[ChildProcess], log: Path | None) -> None:
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    if failed:  # of several, one that was killed did not fail because of another
        number = min(failed, key=lambda number: (ranks[number].returncode or 0) > 0)
        end = ""
        if log is not None:
            lines = end_of_log(log).splitlines()  # an error that several ranks have met stands there once
            once = [line for at, line in enumerate(lines) if not line.startswith("error: ") or line not in lines[:at]]
            end = "\n".join([f"; the end of {log}:", *once])
        raise RankFailedError(f"rank {number} {ranks[number].explain()}{end}", number)
