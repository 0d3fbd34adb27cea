"""What the system says of processes: whose they are, what they run, and whether they have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def _stat(pid: int) -> tuple[str, int] | None:
    """The state and the parent of a process, None when there is none (any more)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return state, int(parent)


def gone(pid: int, seconds: float = 0.0) -> bool:
    """Whether the process has ended, within ``seconds``; a zombie nobody waits for counts as ended."""
    end = time.monotonic() + seconds
    while (stat := _stat(pid)) is not None and stat[0] not in "ZX":
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True


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
    stat = _stat(pid)
    return stat and stat[1]


def command_of(pid: int) -> str:
    """What it was started with, its arguments between spaces; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def descendants(of: int) -> set[int]:
    """Processes below ``of`` that have not ended, except multiprocessing's own helper, and that which forks ranks: it
    stays for the next ones.

    They are found by their parents, not by /proc/PID/task/*/children: these lists go away with the thread that
    started the children, also while they are being read.
    """
    stats = {int(entry): _stat(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    parents = {pid: stat[1] for pid, stat in stats.items() if stat is not None and stat[0] not in "ZX"}
    found: set[int] = set()
    level = {of}
    while level := {pid for pid, parent in parents.items() if parent in level} - found:
        found |= level
    helpers = ("resource_tracker", "fork_server_main")
    # A process that is ending has no command any more.
    commands = {pid: command_of(pid) for pid in found}
    return {pid for pid, command in commands.items() if command and not any(name in command for name in helpers)}
