"""What the system says of processes: whose they are, what they run, and whether they have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil

FORK_SERVER = "nxd fork server"


def gone(pid: int, seconds: float = 0.0) -> bool:
    """Whether the process has ended, within ``seconds``; a zombie nobody waits for counts as ended."""
    end = time.monotonic() + seconds
    while _runs(pid):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Within the block, and until its process is killed, it does not go on."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Until ``condition()`` holds; ``seconds`` guard against hanging, however busy the machine is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.005)


def parent_of(pid: int) -> int | None:
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return None


def command_of(pid: int) -> str:
    """What it was started with, its arguments between spaces; empty once it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""


def name_of(pid: int) -> str:
    """As `ps -e` shows it; empty once it has ended."""
    try:
        return psutil.Process(pid).name()
    except psutil.NoSuchProcess:
        return ""


def descendants(of: int) -> set[int]:
    """Processes below ``of`` that have not ended, except multiprocessing's own helper, and that which forks ranks: it
    stays for the next ones."""
    try:
        found = {child.pid for child in psutil.Process(of).children(recursive=True) if _runs(child.pid)}
    except psutil.NoSuchProcess:
        return set()
    return {
        pid
        for pid in found
        if (command := command_of(pid)) and "resource_tracker" not in command and name_of(pid) != FORK_SERVER
    }
