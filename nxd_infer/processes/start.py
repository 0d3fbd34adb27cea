"""Start a program that imports torch as a fork of a process that has imported it: that takes milliseconds, an
interpreter seconds.

That process is a fork server (``fork_server.py``). This process has one per module and environment; it ends with this
process, and its children with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess  # nosec B404
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import IO, Any

from nxd_infer.processes.child import END_SECONDS, ChildProcess
from nxd_infer.processes.command import python_module

MOST_DESCRIPTORS = 200
"""A child that inherits more is not forked: the kernel sends at most 253 at once."""
_CHECK_SECONDS = 0.05
_LATE = {"_", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL"}
"""With names that begin with ``NXD_``, the variables in which children of one server may differ: none is read while
torch and this package are imported."""
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""With these, OpenMP chooses cores while torch is imported, of those that the importing process may use."""


def start(
    command: Sequence[str],
    *,
    imports: str,
    importing: Mapping[str, str],
    environment: Mapping[str, str],
    check: Callable[[], None],
    bound: Sequence[int] = (),
    inherit: Iterable[int] = (),
    output: int | IO[Any] | None = None,
) -> ChildProcess:
    """Run ``command``, one of ``command.py``, which reads nothing.

    Args:
        imports: module that a fork server imports for it, in the environment ``importing``. "", and
            ``NXD_INFER_FORK=0`` there: it is a new interpreter.
        environment: of the program itself.
        check: called all the time while this waits for the import, which it bounds: what it raises ends the wait, and
            no child starts.
        bound: the cores that ``importing`` binds OpenMP's threads to, if the caller chose them.
        inherit: descriptors that it inherits, with the same numbers.
        output: file for its output and its errors, or PIPE; None: those of this process.

    Raises OSError if the system does not let it start.
    """
    numbers = list(inherit)
    forks = importing.get("NXD_INFER_FORK", "1") != "0" and (bool(bound) or not any(map(importing.get, _BINDING)))
    if not imports or not forks or len(numbers) > MOST_DESCRIPTORS:
        errors = None if output is None else subprocess.STDOUT
        return ChildProcess(command, environment=environment, inherit=numbers, stdout=output, stderr=errors)
    server = _server(imports, importing, bound)
    try:
        return server.fork(command, environment, numbers, output, check)
    except ConnectionError:
        if not server.process.wait(END_SECONDS):
            raise
    return _server(imports, importing, bound).fork(
        command, environment, numbers, output, check
    )  # the first had no work left


class ForkedProcess(ChildProcess):
    """A child of a fork server, which reaps it, and kills what it leaves behind."""

    def __init__(self, pid: int, status: socket.socket, answers: IO[bytes], stdout: IO[bytes] | None):
        """``answers``: what comes from ``status``, at last how it ended."""
        self._watch(pid, status.fileno())
        self._status, self._answers, self.stdout = status, answers, stdout

    def _reap(self) -> int:
        with contextlib.suppress(ConnectionError):  # it had a job that it did not read
            if line := self._answers.readline():
                return int(line)
        self._kill_group()  # its server was killed, and the kernel kills the server's children; not what they started
        return -signal.SIGKILL


class ForkServer:
    """This process's end of a fork server, which may still be importing."""

    def __init__(self, module: str, environment: Mapping[str, str], cores: Sequence[int]):
        """``cores``: on which it imports; empty: on any."""
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote:
            self.process = ChildProcess(
                python_module("nxd_infer.processes.fork_server", str(remote.fileno()), module, *map(str, cores)),
                # NumPy starts its threads when it is imported, and a process with threads must not fork.
                environment={**environment, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                inherit=[remote.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        numbers: Sequence[int],
        output: int | IO[Any] | None,
        check: Callable[[], None],
    ) -> ForkedProcess:
        """See :func:`start`. Raises ConnectionError if the server has ended."""
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:
            status, remote = socket.socketpair()
            kept.enter_context(status)
            sent.enter_context(remote)
            directory = os.open(".", os.O_PATH)
            sent.callback(os.close, directory)
            outputs, reader = [1, 2], None
            if output == subprocess.PIPE:
                read, write = os.pipe()
                reader = kept.enter_context(os.fdopen(read, "rb"))
                sent.callback(os.close, write)
                outputs = [write, write]
            elif output is not None:
                outputs = 2 * [output if isinstance(output, int) else output.fileno()]
            socket.send_fds(self._control, [b"fork"], [remote.fileno(), directory, *outputs, *numbers])
            sent.close()  # so that the end of the server is the end of file
            answers = kept.enter_context(status.makefile("rb"))
            while not wait([status], _CHECK_SECONDS):
                check()
            pid = int(answers.readline() or 0)
            if pid <= 0:
                raise OSError(-pid, os.strerror(-pid)) if pid else ConnectionResetError("a fork server has ended")
            job = {"code": command[2], "arguments": command[3:], "environment": dict(environment)}
            job |= {"numbers": [1, 2, *numbers], "cores": sorted(os.sched_getaffinity(0))}
            with contextlib.suppress(ConnectionError):  # it was killed already
                status.sendall(json.dumps(job).encode() + b"\n")
            kept.pop_all()
        return ForkedProcess(pid, status, answers, reader)


_servers: dict[Any, ForkServer] = {}
_lock = threading.Lock()


def _server(module: str, environment: Mapping[str, str], cores: Sequence[int]) -> ForkServer:
    own = {name: value for name, value in environment.items() if name not in _LATE and not name.startswith("NXD_")}
    kind = module, *sorted(own.items()), resource.getrlimit(resource.RLIMIT_NOFILE)
    with _lock:
        server = _servers.get(kind)
        if server is None or not server.process.running:
            server = _servers[kind] = ForkServer(module, environment, cores)
        return server


def _forget() -> None:
    """In a forked process: the servers are its parent's."""
    global _lock
    _lock = threading.Lock()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
