"""One child process: started in its own session, watched, ended with all its descendants, its end explained."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess  # nosec B404
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

END_SECONDS = 10.0
"""How long a killed process may take to end: one in a system call ends when that returns."""
_LOOK_SECONDS = 0.05
"""How often to poll processes that the kernel cannot notify about."""


class ChildProcess:
    """A process that runs ``command``.

    Args:
        command: see :mod:`nxd_infer.util.python_command`.
        environment: of the child. Default: that of this process.
        inherit: descriptors that the child inherits, with the same numbers.
        stdin, stdout, stderr: as for ``subprocess.Popen``; the child reads nothing unless ``stdin`` is given.

    Raises OSError if the system cannot start it.
    """

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
        self._group_killed = False
        self.pid = self._process.pid
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it, or None while it runs."""
        if self._process.returncode is not None or self._group_killed:
            return self._process.poll()
        try:  # without reaping it: its pid stays reserved until its process group is killed
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # someone else has reaped it
            return self._process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    @property
    def running(self) -> bool:
        return self.returncode is None

    def wait(self, seconds: float) -> bool:
        """Wait for its end; False if it still runs after ``seconds``."""
        return bool(wait_for_an_end([self], seconds))

    def end_descriptor(self) -> int:
        """Return a new descriptor that is readable once it has ended. Raises OSError on an old kernel, and if it was
        reaped already."""
        return os.pidfd_open(self.pid)

    def explain(self) -> str:
        """Return how it ended: ``ended with status 1``, ``was ended by SIGKILL``."""
        code = self.returncode
        if code is None:
            return "is still running"
        return f"ended with status {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def kill(self) -> None:
        """Send SIGKILL to it and to the processes that it has started."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._group_killed = True

    def terminate(self) -> None:
        """Send SIGTERM only to the process itself, so that it can end what it has started."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def end(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for its end, then kill it; in any case kill what it left behind."""
        self.wait(patience)
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
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
    with contextlib.ExitStack() as held:
        descriptors: list[int] = []
        try:
            for child in children:
                descriptors.append(child.end_descriptor())
                held.callback(os.close, descriptors[-1])
            step = seconds
        except OSError:  # an old kernel, or a process that was already reaped
            step = _LOOK_SECONDS
        while True:
            ended = [child for child in children if not child.running]
            left = deadline - time.monotonic()
            if ended or left <= 0:
                return ended
            if step == seconds:
                wait(descriptors, timeout=left)
            else:
                time.sleep(min(step, left))
