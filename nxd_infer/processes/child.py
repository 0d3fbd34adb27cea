"""One child process: started in its own session, watched, ended with all its descendants, its end explained."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess  # nosec B404
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

END_SECONDS = 10.0
"""How long a killed process may take to end: one in a system call ends when that returns."""


class ChildProcess:
    """A process that runs ``command``. What it has started is killed once its own end is seen.

    Args:
        command: see :mod:`nxd_infer.processes.command`.
        environment: of the child. Default: that of this process.
        inherit: descriptors that the child inherits, with the same numbers.
        stdin, stdout, stderr: as for ``subprocess.Popen``; the child reads nothing unless ``stdin`` is given.

    Raises OSError if the system cannot start it.
    """

    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    pid: int
    sentinel: int
    """A descriptor that is readable once it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        inherit: Iterable[int] = (),
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ):
        self._process = subprocess.Popen(  # nosec B603  # this interpreter and our own code
            command,
            env=environment,
            pass_fds=tuple(inherit),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C in a terminal reaches only the parent, which ends it
        )
        try:
            sentinel = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            raise
        self._watch(self._process.pid, sentinel)
        weakref.finalize(self, os.close, sentinel).atexit = False  # this process may still end it then
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout

    def _watch(self, pid: int, sentinel: int) -> None:
        self.pid, self.sentinel = pid, sentinel
        self._code: int | None = None
        self._mutex = threading.RLock()  # reentrant, for signal handlers

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it, or None while it runs."""
        with self._mutex:
            if self._code is None and wait([self.sentinel], 0):
                self._code = self._reap()
            return self._code

    def _reap(self) -> int:
        self._kill_group()  # first: until it is reaped, its pid is its group's
        return self._process.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def running(self) -> bool:
        return self.returncode is None

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False if it still runs after ``seconds``."""
        return bool(wait_for_an_end([self], seconds))

    def explain(self) -> str:
        """Return how it ended: ``ended with status 1``, ``was ended by SIGKILL``."""
        code = self.returncode
        if code is None:
            return "is still running"
        return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Send SIGKILL to it and to the processes that it has started."""
        with self._mutex:
            if self.running:
                self._kill_group()

    def terminate(self) -> None:
        """Send SIGTERM only to the process itself, so that it can end what it has started."""
        with self._mutex:
            if self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGTERM)

    def end(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for its end, then kill it and what it has started."""
        self.wait(patience)
        self.kill()
        self.wait(END_SECONDS)
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # it did not read everything
                    stream.close()


def end_of_log(log: Path) -> str:
    """Return the last lines that a child wrote into ``log``."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def end_all(children: Sequence[ChildProcess], patience: float = 0.0) -> None:
    """Send SIGTERM to all if there is ``patience``, and kill those that still run after that many seconds."""
    if patience:
        for child in children:
            child.terminate()
    deadline = time.monotonic() + patience
    for child in children:
        child.wait(deadline - time.monotonic())
    for child in children:
        child.kill()
    for child in children:
        child.end()


def wait_for_an_end(children: Sequence[ChildProcess], seconds: float) -> list[ChildProcess]:
    """Wait until one of ``children`` has ended, and return those that have; none after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (ended := [child for child in children if not child.running]):
        left = deadline - time.monotonic()
        if left <= 0:
            break
        wait([child.sentinel for child in children], left)
    return ended
