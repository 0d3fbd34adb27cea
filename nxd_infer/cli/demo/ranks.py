"""Start one process a rank, with the environment that torchrun gives them, and leave none behind."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nxd_infer.errors import RankFailedError, RankTimeoutError
from nxd_infer.util.child_process import child_environment
from nxd_infer.util.processors import compute_threads

STOP_TIMEOUT = 3.0
"""Seconds that a rank has to put the terminal in order before it is killed."""


def run_ranks(command: Sequence[str], world_size: int, log: Path, timeout: float) -> None:
    """Run ``command`` once a rank and wait for all of them. Rank 0 prints to this terminal; all else goes to ``log``.

    Raises RankFailedError with the end of the log as soon as one ends with another status than 0, RankTimeoutError
    after ``timeout`` seconds. Whatever happens, Ctrl-C included, no rank is left running.
    """
    deadline = time.monotonic() + timeout
    with _started(command, world_size, log) as ranks:
        while any(rank.poll() is None for rank in ranks):
            _raise_first_failure(ranks, log)
            if time.monotonic() > deadline:
                raise RankTimeoutError(f"the ranks have not ended after {timeout:.0f} s; their log is {log}")
            time.sleep(0.05)
        _raise_first_failure(ranks, log)


@contextlib.contextmanager
def _started(command: Sequence[str], world_size: int, log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it lives as long as the ranks
    threads = max(1, compute_threads() // world_size)
    common = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        **child_environment(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    ranks: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:
        try:
            for rank in range(world_size):
                process = subprocess.Popen(  # nosec B603  # this interpreter and a module of ours
                    command,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=None if rank == 0 else output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C at a terminal reaches this process alone, which ends them
                )
                ranks.append(process)
            yield ranks
        finally:
            for rank in ranks:
                _signal(rank, signal.SIGTERM)
            end = time.monotonic() + STOP_TIMEOUT
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.wait(max(0.0, end - time.monotonic()))
                _signal(rank, signal.SIGKILL)
                rank.wait()
            del store


def _signal(rank: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if rank.poll() is None:
        rank.send_signal(number)


def _raise_first_failure(ranks: list[subprocess.Popen[bytes]], log: Path) -> None:
    for number, rank in enumerate(ranks):
        if rank.poll():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RankFailedError(
                f"rank {number} ended with status {rank.returncode}; the end of {log}:\n{tail}", number
            )
