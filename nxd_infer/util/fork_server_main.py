"""A fork server: ``python -m nxd_infer.util.fork_server_main SOCKET PARENT IDLE MODULE``; see ``fork_server.py``.

It imports MODULE, and forks a child for each job, which then does what ``python -c`` does. A packet on the socket
brings descriptors: of the job (JSON), of the socket for the child's status, of its directory, and those that it gets.
The status begins with ``{"pid": N}``, which the child sends once it leads a session, or with ``{"failed": REASON}``, or
``{"unfit": REASON}`` if no job can be done, and ends with ``{"status": N}``. The child begins once its caller has
answered: a caller that has given up starts the program in another way, and two would read one pipe.

It has no threads, or it would not fork. It ends with its parent, or IDLE seconds after its last child.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nxd_infer.util import this_process
from nxd_infer.util.fork_server import MOST_DESCRIPTORS, NO_WORK
from nxd_infer.util.this_process import die_with_parent, ignore_stop, leave, name_process


@dataclass
class _Job:
    wanted: Mapping[str, Any]
    directory: int
    descriptors: Sequence[int]
    """Those that the child gets, in the order of their numbers in ``wanted``."""


@dataclass
class _Child:
    pid: int
    pidfd: int
    status: int
    """The descriptor of the socket."""


def main(arguments: Sequence[str]) -> None:
    control, parent, idle = socket.socket(fileno=int(arguments[0])), int(arguments[1]), float(arguments[2])
    die_with_parent(parent)
    name_process("nxd fork server")
    path, pid = list(sys.path), os.getpid()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    ignore_stop()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, nobody can say how a child ended
    job = _Server(control, handlers, _import(arguments[3])).serve(idle)
    if job is None:
        leave(NO_WORK)
    this_process.forked_from = os.getpid(), pid
    _settle(job)
    sys.path[:] = path
    _show([arguments[3], *job.wanted["arguments"]])
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    gc.enable()
    code = compile(job.wanted["code"], "<string>", "exec", dont_inherit=True)
    exec(code, program.__dict__)  # nosec B102  # of our parent


def _import(module: str) -> str:
    """Import the module; return why this process cannot fork, if it cannot."""
    gc.disable()  # imported objects stay, and scanning them takes an eighth of the import
    try:
        importlib.import_module(module)
        os.close(os.pidfd_open(os.getpid()))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:1000]
    gc.freeze()  # what no child scans is not copied for it
    return "what was imported has started threads" if len(os.listdir("/proc/self/task")) > 1 else ""


class _Server:
    def __init__(self, control: socket.socket, handlers: Mapping[signal.Signals, Any], unfit: str):
        """``handlers``: of signals, in the children. ``unfit``: why it cannot fork."""
        self._control = control
        self._handlers = handlers
        self._unfit = unfit
        self._asked = True
        self._children: dict[int, _Child] = {}
        """By pidfd, and by the descriptor of the status."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)

    def serve(self, idle: float) -> _Job | None:
        """Do jobs until nobody can ask and no child runs, or until nothing has happened for ``idle`` seconds. Returns
        None then, and in each child its job."""
        while self._asked or self._children:
            events = self._poll.poll(None if self._children else idle * 1000)
            if not events:
                break
            for descriptor, _ in events:  # the jobs first: a new child's numbers are not those of one that has ended
                child = self._children.get(descriptor)
                if descriptor == self._control.fileno():
                    if (job := self._next()) is not None:
                        return job
                elif child is not None and descriptor == child.pidfd:
                    self._report(child)
                elif child is not None:  # the other end is closed, so nobody wants the child any more
                    self._poll.unregister(descriptor)
                    os.kill(child.pid, signal.SIGKILL)  # it may not lead its group yet
                    _kill_group(child.pid)
        return None

    def _next(self) -> _Job | None:
        """Do the next job. Returns it in the child."""
        _, descriptors, flags, _ = socket.recv_fds(self._control, 16, MOST_DESCRIPTORS + 5)
        missing = flags & socket.MSG_CTRUNC
        if not descriptors and not missing:
            self._asked = False
            self._poll.unregister(self._control)
            return None
        with contextlib.ExitStack() as held:
            for descriptor in descriptors:
                held.callback(os.close, descriptor)
            if len(descriptors) < 2:  # there were no numbers left for more; the caller sees the end of file
                return None
            if self._unfit:
                _say(descriptors[1], unfit=self._unfit)
            elif missing:
                _say(descriptors[1], failed="it has no descriptors left")
            elif self._fork(descriptors[1]):
                held.pop_all()
                os.close(descriptors[1])
                with os.fdopen(descriptors[0], "rb") as file:
                    file.seek(0)
                    return _Job(json.loads(file.read()), descriptors[2], descriptors[3:])
        return None

    def _fork(self, status: int) -> bool:
        """Return True in a new child."""
        with contextlib.ExitStack() as held:
            server = os.getpid()
            try:
                own = os.dup(status)
                held.callback(os.close, own)
                pid = os.fork()
            except OSError as error:
                _say(status, failed=f"it cannot fork: {error}")
                return False
            if pid == 0:
                for number, handler in self._handlers.items():
                    signal.signal(number, handler)
                os.setsid()
                die_with_parent(server)
                for descriptor in (self._control.detach(), *self._children):
                    os.close(descriptor)
                _say(status, pid=os.getpid())
                if not _answered(status):
                    os._exit(0)
                return True
            try:
                child = _Child(pid, os.pidfd_open(pid), own)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _say(status, status=-signal.SIGKILL)
                return False
            held.pop_all()
        self._children[child.pidfd] = self._children[own] = child
        self._poll.register(child.pidfd, select.POLLIN)
        self._poll.register(own, 0)
        return False

    def _report(self, child: _Child) -> None:
        """A child has ended: end what it has started, let its pid go, and say how it ended."""
        del self._children[child.pidfd], self._children[child.status]
        self._poll.unregister(child.pidfd)
        with contextlib.suppress(KeyError):
            self._poll.unregister(child.status)
        os.close(child.pidfd)
        _kill_group(child.pid)
        _, code = os.waitpid(child.pid, 0)
        _say(child.status, status=os.waitstatus_to_exitcode(code))
        os.close(child.status)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _say(to: int, **what: Any) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know
        os.write(to, json.dumps(what).encode())


# --- in a child ---------------------------------------------------------------------------------------


def _answered(status: int) -> bool:
    """Whether the caller still wants this process."""
    try:
        return bool(os.read(status, 16))
    except OSError:
        return False


def _settle(job: _Job) -> None:
    """Make this process one that the server's parent could have started."""
    os.fchdir(job.directory)
    os.close(job.directory)
    _place(job.descriptors, job.wanted["numbers"])
    os.environ.clear()
    os.environ.update(job.wanted["environment"])
    with contextlib.suppress(OSError):  # some of them are there no more
        os.sched_setaffinity(0, job.wanted["cores"])
    tempfile.tempdir = None  # it remembers what the server's environment says
    for seeded in ("numpy.random", "torch.random"):  # Python's own does this by itself
        if seeded in sys.modules:
            sys.modules[seeded].seed()
    sys.argv[:] = ["-c", *job.wanted["arguments"]]
    name_process("python")


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give each descriptor its number, whatever number it came with."""
    moved, others = [], []
    for descriptor in descriptors:
        place = descriptor
        while place in numbers:  # which would be lost as another one is put there
            others.append(place)
            place = os.dup(place)
        moved.append(place)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
    for descriptor in {*moved, *others} - set(numbers):
        os.close(descriptor)


def _show(words: Sequence[str]) -> None:
    """Show what this process does in `ps`, in the place of the server's command, as far as there is room."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start, arg_end: 0 where the kernel keeps them secret
    if room := end - start:
        text = b"\0".join(map(os.fsencode, words))[: room - 1]
        ctypes.memmove(start, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main(sys.argv[1:])
