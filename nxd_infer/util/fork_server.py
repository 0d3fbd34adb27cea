"""Start a Python program as a fork of a process that has imported it: that takes milliseconds, an interpreter seconds.

:func:`fork_server` starts that process (``fork_server_main.py``), and :meth:`ForkServer.fork` a program. It is to be
what a new interpreter would be, so a server has one program, one environment, and one set of limits, rights and
signals; this process keeps one server a program, and replaces it when any of these differ. One thing differs: NumPy's
linear algebra has one thread in a server's children.

A server ends with this process, and some time after its last child. A child ends with its server, and when its
:class:`ForkedProcess` is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import resource
import socket
import subprocess  # nosec B404
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from nxd_infer.util.child_process import END_SECONDS
from nxd_infer.util.forked_process import ForkedProcess, readable
from nxd_infer.util.python_command import python_module

MOST_DESCRIPTORS = 200
"""A child that inherits more is not forked: the kernel sends at most 253 at once."""
IDLE_SECONDS = 60.0
"""How long a server without children stays."""
NO_WORK = 64
"""Its exit status then."""
_START_SECONDS = 20.0
"""How long the system may take to start the server's process, before it imports anything."""
_IMPORT_SECONDS = 200.0
"""How long the import may take, on a busy machine with cold files. Then new interpreters may try ..."""
_STOPPED_SECONDS = 20.0
"""... and so they may if it has taken this long when somebody gave up waiting."""
_ANSWER_SECONDS = 10.0
"""How long a server that has forked before may take to fork again, which it does in milliseconds; then it is one that
does not go on ..."""
_UNWANTED_SECONDS = 1.0
"""... and so it is after this long if somebody gave up waiting."""
_LOOK_SECONDS = 0.02
"""How often to look whether an answer is still wanted."""
_LATE = {"_", "OLDPWD", "PWD", "PYTEST_CURRENT_TEST", "SHLVL"}
"""With names that begin with ``NXD_``, the variables in which children of one server may differ: none is read while
torch and this package are imported."""
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")
"""With these, OpenMP chooses cores while torch is imported, of those that the importing process may use."""
_RIGHTS = ("Uid", "Gid", "Groups", "Cap", "NoNewPrivs", "Seccomp", "SigBlk", "SigIgn", "Umask", "Mems_allowed")
"""Lines of ``/proc/self/status`` that a new process takes from the one that starts it."""


class CannotForkError(Exception):
    """The fork server cannot do this. A new interpreter can, or says why it cannot either."""


@dataclass
class _Running:
    """What the thread that starts a server, and waits for its end, shares with others."""

    process: subprocess.Popen[bytes] | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def live(self, command: Sequence[str], environment: Mapping[str, str], theirs: socket.socket) -> None:
        """The kernel ends the server when this thread ends, which is with this process. Closes ``theirs``."""
        try:
            self.process = subprocess.Popen(  # nosec B603  # this interpreter and our own code
                command,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except Exception as error:
            self.error = f"it does not start: {error}"
            return
        finally:
            theirs.close()
            self.started.set()
        self.process.wait()
        self.ended.set()


class ForkServer:
    """This process's end of a fork server, which may still be importing. Once this object is gone, the server ends
    after its last child."""

    def __init__(self, module: str, environment: Mapping[str, str]):
        """Raises CannotForkError if the system does not let it start."""
        self.failure = ""
        """Why it cannot fork, once that is known."""
        self._forked = 0.0
        """When it forked for the first time."""
        self._children: weakref.WeakSet[ForkedProcess] = weakref.WeakSet()
        self._asking = 0
        """How many threads wait for a child."""
        self._mutex = threading.Lock()
        self._begun = time.monotonic()
        self._running = _Running()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_SECONDS)  # to send: one that does not go on takes only a few jobs
        words = (str(theirs.fileno()), str(os.getpid()), str(IDLE_SECONDS), module)
        command = python_module("nxd_infer.util.fork_server_main", *words)
        # NumPy starts its threads when it is imported, and a process with threads must not fork.
        own = {**environment, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        live, arguments = self._running.live, (command, own, theirs)
        try:
            threading.Thread(target=live, args=arguments, name="nxd-fork-server", daemon=True).start()
        except RuntimeError as error:
            theirs.close()
            raise CannotForkError(f"the system does not let a thread start: {error}") from None
        if not self._running.started.wait(_START_SECONDS):
            self.failure = f"it has not started for {_START_SECONDS:.0f} s"
        elif self._running.error:
            raise CannotForkError(self._running.error)

    def __del__(self) -> None:
        self._control.close()

    @property
    def usable(self) -> bool:
        """False once it has ended as it should, or has forked and does not go on: then another one may work."""
        return not self._forked if self.failure else not self._running.ended.is_set()

    def check(self) -> None:
        """Raise CannotForkError if it has shown that it cannot fork."""
        if self.failure:
            raise CannotForkError(self.failure)

    def fork(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        inherit: Iterable[int],
        stdout: int | IO[Any] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> ForkedProcess:
        """Run ``command``, one of ``python_command.py``, once the server has imported its module.

        Args:
            environment, inherit: as for ChildProcess; the child reads nothing.
            stdout: PIPE or a file, for its output and its errors, or None, for those of this process.
            stopped: whether the child is wanted no more; asked all the time, from this thread.

        Raises CannotForkError, and OSError if there are no descriptors left.
        """
        self.check()
        numbers = list(inherit)
        if len(numbers) > MOST_DESCRIPTORS or max(numbers, default=0) >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            raise CannotForkError("the descriptors are too many to send, or above the limit")
        if stdout is None:
            _check_inheritable(1, 2)
        job = {"code": command[2], "arguments": command[3:], "environment": dict(environment)}
        job["cores"] = sorted(os.sched_getaffinity(0))
        with contextlib.ExitStack() as sent, contextlib.ExitStack() as kept:
            status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept.enter_context(status)
            kept.callback(_hang_up, status)
            sent.enter_context(theirs)
            text = os.memfd_create("nxd-job")  # a packet would be too small for a large environment
            sent.callback(os.close, text)
            os.write(text, json.dumps({**job, "numbers": [1, 2, *numbers]}).encode())
            try:
                directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
            except PermissionError as error:  # one that had rights when it went there
                raise CannotForkError(f"its directory cannot be opened: {error}") from None
            sent.callback(os.close, directory)
            output, errors, reader = 1, 2, None
            if stdout == subprocess.PIPE:
                read, output = os.pipe()
                reader = kept.enter_context(os.fdopen(read, "rb"))
                sent.callback(os.close, output)
                errors = output
            elif stdout is not None:
                output = errors = stdout if isinstance(stdout, int) else stdout.fileno()
            try:
                descriptors = [text, theirs.fileno(), directory, output, errors, *numbers]
                socket.send_fds(self._control, [b"job"], descriptors)
            except OSError as error:
                self._check_imported()
                raise CannotForkError(f"it takes no job: {error}") from None
            sent.close()  # so that the end of the server is the end of file
            pid = self._answer(status, stopped)
            with self._mutex:
                self.check()  # another thread may just have given it up, and be about to end it
                self._forked = self._forked or time.monotonic()
                with contextlib.suppress(OSError):  # it was killed already
                    status.send(b"go")
                kept.pop_all()
                child = ForkedProcess(pid, self._running.process.pid if self._running.process else 0, status, reader)
                self._children.add(child)
        return child

    def _answer(self, status: socket.socket, stopped: Callable[[], bool]) -> int:
        """Return the child's pid. It waits for a word of this process."""
        with self._mutex:
            self._asking += 1
        try:
            return self._wait(status, stopped)
        finally:
            with self._mutex:
                self._asking -= 1

    def _wait(self, status: socket.socket, stopped: Callable[[], bool]) -> int:
        asked = time.monotonic()
        while not readable(status.fileno(), _LOOK_SECONDS):
            unwanted = stopped()
            if self._forked:  # perhaps just now, for another thread: then this one's turn is next
                begun, most = max(asked, self._forked), _UNWANTED_SECONDS if unwanted else _ANSWER_SECONDS
            elif unwanted:
                begun, most = asked, _STOPPED_SECONDS
            else:
                begun, most = self._begun, _IMPORT_SECONDS
            alone = not unwanted or self._asking == 1  # else others go on waiting
            if (seconds := time.monotonic() - begun) > most and alone:
                self._fail(f"it has not forked for {seconds:.0f} s")
            if unwanted:
                raise CannotForkError("nobody wants the process any more")
        written = status.recv(1 << 16)
        answer = json.loads(written) if written else {}
        if not written:
            self._check_imported()
        if "unfit" in answer:
            self._fail(answer["unfit"])
        if "pid" not in answer:
            raise CannotForkError(answer.get("failed") or "it has ended")
        return answer["pid"]

    def _check_imported(self) -> None:
        """Raise CannotForkError, now and from then on, if the server has ended before it forked once."""
        running = self._running
        if self._forked or not running.ended.wait(END_SECONDS) or running.process is None:
            return
        if running.process.returncode != NO_WORK:
            self._fail("it ended while it imported")

    def _fail(self, reason: str) -> None:
        """Remember that it does not fork, and end it, unless children run, which do not need it and would end too."""
        with self._mutex:
            self.failure = self.failure or reason
            needed = any(child.running for child in self._children)
        if not needed:
            self.end()
        self.check()

    def end(self) -> None:
        """End it, and its children."""
        process = self._running.process
        if process is not None:
            with contextlib.suppress(PermissionError):
                process.kill()
            self._running.ended.wait(END_SECONDS)

    def forget(self) -> None:
        """In a forked process: it is the parent's."""
        self._control.close()


def _check_inheritable(*numbers: int) -> None:
    """Raise CannotForkError unless a new interpreter would have these descriptors: a closed one's number may be that of
    one of this module's own."""
    for number in numbers:
        try:
            inheritable = os.get_inheritable(number)
        except OSError:
            inheritable = False
        if not inheritable:
            raise CannotForkError(f"descriptor {number} is closed, or kept from other programs")


def _hang_up(status: socket.socket) -> None:
    """End the connection also where a fork of this process has a copy of ``status``."""
    with contextlib.suppress(OSError):
        status.shutdown(socket.SHUT_RDWR)


_kept: dict[str, tuple[Any, ForkServer]] = {}
"""By the module that it imports: what its children have in common, and the server."""
_lock = threading.Lock()


def fork_server(module: str, environment: Mapping[str, str]) -> ForkServer:
    """Return the server that has imported ``module``, or is about to, in ``environment``. ``NXD_INFER_FORK=0`` there
    turns it off.

    Raises CannotForkError also where a server of the same kind has shown that it cannot.
    """
    if environment.get("NXD_INFER_FORK", "1") == "0" or any(name in environment for name in _BINDING):
        raise CannotForkError("turned off, or OpenMP is told its cores")
    try:
        kind = _kind(environment)
    except OSError as error:
        raise CannotForkError(f"/proc cannot be read: {error}") from None
    with _lock:
        of_what, server = _kept.get(module, (None, None))
        if server is None or of_what != kind or not server.usable:
            _kept.pop(module, None)  # it ends after its last child, also if there can be no other
            server = ForkServer(module, environment)
            _kept[module] = kind, server
    server.check()
    return server


def _kind(environment: Mapping[str, str]) -> tuple[Any, ...]:
    """What the children of one server have in common."""
    own = {name: value for name, value in environment.items() if name not in _LATE and not name.startswith("NXD_")}
    rights = [line for line in Path("/proc/thread-self/status").read_text().splitlines() if line.startswith(_RIGHTS)]
    files = [Path("/proc/self", name).read_text() for name in ("limits", "cgroup", "oom_score_adj")]
    links = [os.readlink(path) for path in ("/proc/self/root", *map(str, sorted(Path("/proc/self/ns").iterdir())))]
    order = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return sorted(own.items()), rights, files, links, order


def _forget() -> None:
    """In a forked process: the servers are its parent's."""
    global _lock
    _lock = threading.Lock()
    for _, server in _kept.values():
        server.forget()
    _kept.clear()


@atexit.register
def _end() -> None:
    for _, server in _kept.values():
        server.end()


os.register_at_fork(after_in_child=_forget)
