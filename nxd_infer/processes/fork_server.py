"""A fork server: ``python -m nxd_infer.processes.fork_server SOCKET MODULE [CORE ...]``; ``start.py`` starts it.

It imports MODULE, on these cores, and forks a child for each packet on the socket, which brings descriptors: of the
child's status, of its directory, and those that it gets. The child says its pid at the status, reads its job there
(JSON), and does it as ``python -c`` would; a caller that wants it no more closes the status instead. The server says
there how it ended.

It has no threads, or it would not fork. It ends, with its children, when the other end of the socket is closed, and
IDLE_SECONDS after its last child.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Sequence
from typing import Any

from nxd_infer.processes import own
from nxd_infer.processes.start import MOST_DESCRIPTORS

IDLE_SECONDS = 60.0


def main(arguments: Sequence[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    own.name_process("nxd fork server")
    own.ignore_stop()
    if cores := [int(core) for core in arguments[2:]]:
        os.sched_setaffinity(0, cores)
    gc.disable()  # imported objects stay, and scanning them takes an eighth of the import
    with contextlib.suppress(BaseException):  # a child imports it again, and says what is wrong
        importlib.import_module(arguments[1])
    gc.freeze()  # what no child scans is not copied for it
    job = _serve(control)
    if job is not None:
        _run(job)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork children; return the job in each of them, and None in this process once it has no work."""
    children: dict[int, tuple[int, int]] = {}
    """The pid and the status of each, by its pidfd."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while events := poll.poll(None if children else IDLE_SECONDS * 1000):
        for descriptor, _ in events:
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                pid, status = children.pop(descriptor)
                _kill_group(pid)  # before its pid is let go
                _say(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            packet, descriptors, _, _ = socket.recv_fds(control, 16, MOST_DESCRIPTORS + 4)
            if not packet:
                for pid, _ in children.values():
                    _kill_group(pid)
                return None
            status, *others = descriptors
            server = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:
                _say(status, -(error.errno or 0))
            else:
                if pid == 0:
                    control.close()
                    for kept in (*children, *(status for _, status in children.values())):
                        os.close(kept)
                    return _begin(server, status, others)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = pid, status
                poll.register(pidfd, select.POLLIN)
            for other in others:
                os.close(other)
    return None


def _say(status: int, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know
        os.write(status, b"%d\n" % number)
    os.close(status)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


# --- in a child ---------------------------------------------------------------------------------------


def _begin(server: int, status: int, descriptors: Sequence[int]) -> dict[str, Any]:
    """Return the job, once this process is one that its caller could have started; end if there is none."""
    own.die_with_parent(server)
    own.forked = True
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with socket.socket(fileno=status) as connection, connection.makefile("rb") as lines:
        try:
            connection.sendall(b"%d\n" % os.getpid())
            line = lines.readline()
        except ConnectionError:
            line = b""
    if not line:
        os._exit(0)
    job = json.loads(line)
    directory, *received = descriptors
    os.fchdir(directory)
    os.close(directory)
    above = max(job["numbers"]) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, number in zip(moved, job["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job["environment"])
    with contextlib.suppress(OSError):  # some of them are there no more
        os.sched_setaffinity(0, job["cores"])
    return job


def _run(job: dict[str, Any]) -> None:
    """Do what ``python -c`` does."""
    for seeded in ("numpy.random", "torch.random"):  # Python's own does this by itself
        if seeded in sys.modules:
            sys.modules[seeded].seed()
    own.name_process("python")
    sys.argv[:] = ["-c", *job["arguments"]]
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    gc.enable()
    code = compile(job["code"], "<string>", "exec", dont_inherit=True)
    exec(code, program.__dict__)  # nosec B102  # of our parent


if __name__ == "__main__":
    main(sys.argv[1:])
