"""A separate process for work that may take long or much memory: templates, large bodies, long texts.

A template is a program and tokenizing has no point where a thread could be stopped, so both run in a process that can
be killed: at a deadline, when the client disconnects, or by the system when they exceed their memory limit. The memory
of a job is returned to the system: after a large one the process exits, and the next job starts another.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from nxd_server.errors import BodyError, EngineUnavailableError, RequestError, TextTooLongError

START_SECONDS = 30.0
NICENESS = 5
"""Streams have priority: a text, a template or a large body may be slower."""
SMALL = 2**16
"""Smaller payloads are joined with the header in one write; a second write would wake the reader twice."""
_HEAD = struct.Struct("<II")
# Import modules from this process's search path only, not from the environment or the working directory.
_COMMAND = (
    f"import os; os.nice({NICENESS}); "  # first, because starting already takes a while
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from nxd_server.text.text_process_main import main; main()"
)
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    # glibc returns larger blocks as soon as they are freed, whatever the heap's size.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


class JobFailed(Exception):
    """A job that was ended from outside: by its deadline if ``late``, else by the system (out of memory).

    ``starting``: the process ended before the job, while it read its setup.
    """

    def __init__(self, late: bool, starting: bool = False):
        super().__init__("late" if late else "died")
        self.late = late
        self.starting = starting


def not_started(reason: str) -> EngineUnavailableError:
    """Return the error of a request whose process did not start."""
    return EngineUnavailableError(f"a process for texts did not start ({reason})", "busy", 1.0)


@dataclass(frozen=True)
class Setup:
    """The data a process needs before its first job."""

    header: dict[str, Any]
    blob: bytes = b""


class TextProcess:
    """One process, started when first needed; it runs one job at a time.

    Args:
        make_setup: called whenever a process is started.
    """

    def __init__(self, make_setup: Callable[[], Setup]):
        self._make_setup = make_setup
        self._turn = threading.Lock()
        self._state = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._job: object | None = None
        self._cancelled: object | None = None
        self._killed = False
        """Set by :meth:`cancel`, which may come when the answer is already here: the process gets no further job."""
        self._stopped = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def run(
        self, header: dict[str, Any], blob: bytes = b"", *, seconds: float, job: object | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Run one job; blocks. ``job`` identifies it for :meth:`cancel`.

        Raises:
            RequestError: the job rejected its input.
            JobFailed: it exceeded ``seconds`` or its memory limit.
            EngineUnavailableError: the process did not start, or :meth:`stop` was called.
        """
        with self._turn:
            with self._state:
                if job is not None and self._cancelled is job:
                    raise JobFailed(late=False)  # cancelled before it began; nobody waits for it
                self._job = job
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._end()  # it died while idle, so this job is not to blame
                if self._socket is None:
                    self._start()
                answer, data = self._ask({**header, "seconds": seconds}, blob, seconds)
            finally:
                with self._state:
                    killed, self._killed, self._job = self._killed, False, None
                if killed:
                    self._end()
            if answer.get("last"):
                self._end()
            if answer.get("memory"):
                raise JobFailed(late=False)
            if "refused" in answer:
                raise _refusal(answer)
            return answer, data

    def cancel(self, job: object) -> None:
        """Kill the process if it is running ``job``, or do not start it; from any thread."""
        with self._state:
            self._cancelled = job
            if self._job is job:
                self._killed = True
                if self._process is not None:
                    self._process.kill()

    def stop(self) -> None:
        """Stop for good, whatever is running; from any thread."""
        with self._state:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            self._end()

    def _start(self) -> None:
        setup = self._make_setup()
        paths = json.dumps([path for path in sys.path if path])
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        try:
            ours, theirs = socket.socketpair()
            with self._state, theirs:
                self._check_open()
                if self._killed:
                    raise JobFailed(late=False)
                self._process = subprocess.Popen(  # nosec B603  # this interpreter and our own code
                    [sys.executable, "-I", "-c", _COMMAND, paths],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**kept, **_ENVIRONMENT},
                    start_new_session=True,  # Ctrl-C in a terminal reaches only the server
                )
                self._socket = ours
        except OSError as error:
            raise not_started(str(error.strerror)) from None
        try:
            self._answer(START_SECONDS)  # it has imported what it needs
        except JobFailed as error:
            raise not_started(str(error)) from None
        try:
            answer, _ = self._ask(setup.header, setup.blob, START_SECONDS)
        except JobFailed as error:
            raise JobFailed(error.late, starting=True) from None
        if "refused" in answer:
            self._end()
            raise _refusal(answer)

    def _ask(self, header: dict[str, Any], blob: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        assert self._socket is not None
        try:
            write_frame(self._socket, header, blob, seconds)
        except OSError as error:
            self._fail(error)
        return self._answer(seconds)

    def _answer(self, seconds: float) -> tuple[dict[str, Any], bytes]:
        assert self._socket is not None
        try:
            return read_frame(self._socket, seconds)
        except (OSError, EOFError) as error:
            self._fail(error)

    def _fail(self, error: Exception) -> NoReturn:
        self._end()
        with self._state:
            self._check_open()
        raise JobFailed(late=isinstance(error, TimeoutError)) from None

    def _check_open(self) -> None:
        if self._stopped:
            raise EngineUnavailableError("the server is shutting down", "draining")

    def _end(self) -> None:
        with self._state:
            process, connection = self._process, self._socket
            self._process = self._socket = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


def _refusal(answer: dict[str, Any]) -> RequestError:
    field, message = answer["refused"]
    if "code" in answer:
        return BodyError(message, answer["code"])
    return (TextTooLongError if answer.get("too_long") else RequestError)(field, message)


def write_frame(
    connection: socket.socket, header: dict[str, Any], blob: bytes = b"", seconds: float | None = None
) -> None:
    """Write a JSON header and bytes. Raises TimeoutError after ``seconds``, OSError if the other side is gone."""
    head = json.dumps(header).encode()
    connection.settimeout(seconds)
    start = _HEAD.pack(len(head), len(blob)) + head
    if len(blob) <= SMALL:
        connection.sendall(start + blob)
    else:
        connection.sendall(start)
        connection.sendall(blob)


def read_frame(connection: socket.socket, seconds: float | None = None) -> tuple[dict[str, Any], bytes]:
    """Read what :func:`write_frame` wrote. Raises EOFError if the other side is gone."""
    end = None if seconds is None else time.monotonic() + seconds
    head, blob = _HEAD.unpack(_read(connection, _HEAD.size, end))
    return json.loads(_read(connection, head, end)), bytes(_read(connection, blob, end))


def _read(connection: socket.socket, size: int, end: float | None) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        if end is not None:
            connection.settimeout(max(0.001, end - time.monotonic()))
        count = connection.recv_into(view[done:])
        if count == 0:
            raise EOFError
        done += count
    return data
