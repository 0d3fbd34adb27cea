"""A program that runs as a fork of a fork server, which is its parent; this process starts it and sees how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import IO

from nxd_infer.util.child_process import END_SECONDS, ChildProcess
from nxd_infer.util.process_state import exit_code, process_state

_SAY_SECONDS = 1.0
"""How long a server that is not stopped may take to reap a child and say how it ended."""


class ForkedProcess(ChildProcess):
    """A child of a fork server, which reaps it, and kills what it leaves behind. A server that does not go on does
    neither: then the kernel says that the child has ended, and this process kills what it left behind."""

    def __init__(self, pid: int, server: int, status: socket.socket, stdout: IO[bytes] | None):
        """``server``: the process that says at ``status`` how it ended."""
        self.pid = pid
        self._server = server
        self.stdin = None
        self.stdout = stdout
        self._status = status
        self._code: int | None = None
        self._lost = False
        self._pidfd = -1
        with contextlib.suppress(OSError):  # it was reaped already, or there are no descriptors left
            self._pidfd = os.pidfd_open(pid)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the interpreter's end ``os`` may be gone
        self._status.close()
        if self._pidfd >= 0:
            close(self._pidfd)

    @property
    def returncode(self) -> int | None:
        """Its exit status, or minus the number of the signal that ended it, or None while it runs."""
        if self._code is None:
            self._code = self._find_end()
        return self._code

    def _find_end(self) -> int | None:
        ended = self._seen_to_end()
        if ended and process_state(self._server) != "stopped":
            readable(self._status.fileno(), _SAY_SECONDS)
        said = self._said()
        if said is not None:
            return json.loads(said)["status"] if said else self._end_of_a_lost_one()
        if not ended:
            return None
        try:
            code = exit_code(self.pid)
            signal.pidfd_send_signal(self._pidfd, 0)  # it is still there to be reaped, so that was not another's
        except OSError:  # the server has just reaped it, and is about to say how it ended
            return None
        self._kill_group()
        return code

    def _said(self) -> bytes | None:
        """What the server says of its end: None before it does, empty once the server itself has ended."""
        try:
            return self._peek()
        except ConnectionResetError:  # said once, of a child that was killed before it had read that it may begin
            return self._peek()

    def _peek(self) -> bytes | None:
        try:  # without taking it: other threads are to see it too
            return self._status.recv(1 << 10, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _seen_to_end(self) -> bool:
        return self._pidfd >= 0 and readable(self._pidfd, 0.0)

    def _end_of_a_lost_one(self) -> int | None:
        """The server was killed, and the kernel kills its children; nobody kills what these have started."""
        if not self._lost:
            self._lost = True  # once, because its pid may then be another's
            self._kill_group()
        if self._pidfd >= 0 and not self._seen_to_end():
            return None
        with contextlib.suppress(ChildProcessError):  # of process 1 it is a child now
            os.waitpid(self.pid, os.WNOHANG)
        return -signal.SIGKILL

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end_descriptor(self) -> int:
        """Return a new descriptor that is readable once it has ended."""
        return os.dup(self._status.fileno() if self._pidfd < 0 else self._pidfd)

    def explain(self) -> str:
        """Return how it ended."""
        ended = super().explain()
        return f"{ended}, with the process that it was forked from" if self._lost else ended

    def kill(self) -> None:
        """Send SIGKILL to it and to the processes that it has started."""
        if self.returncode is None:
            self._kill_group()

    def end(self, patience: float = 0.0) -> None:
        """Wait ``patience`` seconds for its end, then kill it; in any case kill what it left behind."""
        self.wait(patience)
        self.kill()
        self.wait(END_SECONDS)
        if self.stdout is not None:
            self.stdout.close()


def readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()  # select() supports no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
