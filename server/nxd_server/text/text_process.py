"""A process beside the server for what may take long or much memory: templates, large bodies, texts of any size.

A template is a program and a text has no end that a thread could be stopped at, so both run where they can be killed:
at a deadline, when the client leaves, or by the system when they ask for more memory than they may have. What a job
took goes back to the system: after a large one the process ends, and the next job starts another.
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
from typing import Any

from nxd_server.errors import BodyError, EngineUnavailableError, RequestError, TextTooLongError

START_SECONDS = 30.0
NICENESS = 5
"""Streams come first: a text, a template or a large body may take its time."""
SMALL = 2**16
"""Bytes that are copied rather than sent by themselves, which would wake the other side twice."""
_HEAD = struct.Struct("<II")
# Modules come from where this process finds them, and from nowhere that the environment or the directory names.
_COMMAND = (
    f"import os; os.nice({NICENESS}); "  # first: even to start takes a while
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from nxd_server.text.text_process_main import main; main()"
)
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
    # glibc gives back what is larger as soon as it is free, however much of it there was before.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}


class JobFailed(Exception):
    """A job that was ended from outside; ``late``: by its deadline, else by the system (it ran out of memory)."""

    def __init__(self, late: bool):
        super().__init__("late" if late else "died")
        self.late = late


@dataclass(frozen=True)
class Setup:
    """What a process needs before its first job."""

    header: dict[str, Any]
    blob: bytes = b""


class TextProcess:
    """One process, started when it is first needed; its jobs run one after the other.

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
        """By :meth:`cancel`, which may come when the answer is here: the process does not live for another job."""
        self._stopped = False

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def run(
        self, header: dict[str, Any], blob: bytes = b"", *, seconds: float, job: object | None = None
    ) -> tuple[dict[str, Any], bytes]:
        """Do one job; blocks. ``job`` is what :meth:`cancel` may be called with meanwhile.

        Raises:
            RequestError: the job itself refused what it was given.
            JobFailed: it took more than ``seconds``, or more memory than it may.
            EngineUnavailableError: :meth:`stop` came.
        """
        with self._turn:
            with self._state:
                if job is not None and self._cancelled is job:
                    raise JobFailed(late=False)  # before it began, and nobody waits for it
                self._job = job
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._end()  # while it had nothing to do: no fault of this job
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
        """Kill the process if it is doing ``job``, or do not begin with it; from any thread."""
        with self._state:
            self._cancelled = job
            if self._job is job:
                self._killed = True
                if self._process is not None:
                    self._process.kill()

    def stop(self) -> None:
        """End for good, whatever it is doing; from any thread."""
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
                self._process = subprocess.Popen(  # nosec B603  # this interpreter and code of ours
                    [sys.executable, "-I", "-c", _COMMAND, paths],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**kept, **_ENVIRONMENT},
                    start_new_session=True,  # Ctrl-C at a terminal reaches the server alone
                )
                self._socket = ours
        except OSError as error:
            raise EngineUnavailableError(
                f"no process for texts could be started: {error.strerror}", "busy", 1.0
            ) from None
        answer, _ = self._ask(setup.header, setup.blob, START_SECONDS)
        if "refused" in answer:
            self._end()
            raise _refusal(answer)

    def _ask(self, header: dict[str, Any], blob: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        assert self._socket is not None
        try:
            write_frame(self._socket, header, blob, seconds)
            return read_frame(self._socket, seconds)
        except (OSError, EOFError) as error:
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
    """Write a JSON header and bytes; TimeoutError after ``seconds``, OSError when the other side is gone."""
    head = json.dumps(header).encode()
    connection.settimeout(seconds)
    start = _HEAD.pack(len(head), len(blob)) + head
    if len(blob) <= SMALL:
        connection.sendall(start + blob)
    else:
        connection.sendall(start)
        connection.sendall(blob)


def read_frame(connection: socket.socket, seconds: float | None = None) -> tuple[dict[str, Any], bytes]:
    """What :func:`write_frame` wrote; EOFError when the other side is gone."""
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
