"""A model's chat template in a process of its own.

A template is a program that any downloaded model may bring. So it runs where it can be killed: at a deadline, when the
client disconnects, or by the system when it exceeds its memory limit.
"""

from __future__ import annotations

import functools
import json
import marshal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.processes.child import ChildProcess
from nxd_infer.processes.command import child_environment, python_code
from nxd_server.errors import EngineUnavailableError, RequestError, TextTooLongError
from nxd_server.text.chat_template import TemplateSources
from nxd_server.text.template_process_main import START_SECONDS, TEMPLATE_MEMORY
from nxd_server.threads import ConcurrencyLimit

NICENESS = 5
"""Streams have priority."""
MIB = 2**20
_CODE = (
    f"import os; os.nice({NICENESS}); "  # first, because starting already takes a while
    "from nxd_server.text.template_process_main import main; main()"
)
_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSAFEPATH")
"""All that the process sees of the environment."""


class RenderingFailed(Exception):
    """A rendering that was ended from outside: by its deadline if ``late``, else by the system (out of memory).

    ``starting``: the process ended before, while it compiled the template.
    """

    def __init__(self, late: bool, starting: bool = False):
        super().__init__("late" if late else "died")
        self.late = late
        self.starting = starting


@dataclass
class _Rendering:
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    most: int
    cancelled: bool = False


class BoundedTemplate:
    """A chat template; one conversation is rendered at a time. The process is started when first needed."""

    def __init__(self, sources: TemplateSources, seconds: float, queue: int | None = None):
        """``seconds`` for each rendering; ``queue`` conversations may wait, or as many as a
        ConcurrencyLimit takes."""
        self.source = "\n".join([sources.default, *sources.named.values()])
        named, special = dict(sources.named), dict(sources.special_tokens)
        self._setup = json.dumps({"source": sources.default, "named": named, "special_tokens": special}).encode()
        self._seconds = seconds
        self._limit = ConcurrencyLimit("conversations", 1, queue)
        self._turn = threading.Lock()
        self._state = threading.Lock()
        """Guards the fields below."""
        self._process: ChildProcess | None = None
        self._connection: Connection | None = None
        self._running: _Rendering | None = None
        self._stopped = False

    @property
    def inside(self) -> int:
        """The number of running and waiting conversations."""
        return self._limit.inside

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def check(self) -> None:
        """Raise ModelConfigError if the template cannot be used with any conversation; blocks."""
        try:
            self.render_here([{"role": "user", "content": ""}], {}, MIB)
        except RenderingFailed as error:
            raise ModelConfigError(f"the model's chat template cannot be used: {self._why(error)}") from None
        except RequestError as error:
            if not error.field:  # it does not compile; if it only rejects this conversation, it may accept others
                raise ModelConfigError(error.message) from None

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], most: int) -> str:
        """Return the prompt, of at most ``most`` characters. Raises RequestError if the template gives none."""
        one = _Rendering(messages, variables, most)
        try:
            return await self._limit.run(functools.partial(self._run, one), functools.partial(self._cancel, one))
        except RenderingFailed as error:
            if error.starting:  # no request is to blame for that, nor a template that was checked at the start
                raise _not_started(str(error)) from None
            raise RequestError("messages", f"the model's chat template was ended: {self._why(error)}") from None

    def render_here(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], most: int) -> str:
        """Like :meth:`render`, but blocks. Raises RenderingFailed as well."""
        return self._run(_Rendering(messages, variables, most))

    def stop(self) -> None:
        """Stop for good, whatever is running; from any thread."""
        with self._state:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
        with self._turn:
            self._end()

    def _why(self, error: RenderingFailed) -> str:
        if error.late:
            return f"it did not come to an end within {self._seconds:g} s (render_timeout)"
        return f"it takes more than {TEMPLATE_MEMORY // MIB} MiB of memory, or ended its process otherwise"

    def _run(self, one: _Rendering) -> str:
        with self._turn:
            with self._state:
                if one.cancelled:
                    raise RenderingFailed(late=False)  # nobody waits for it
                self._running = one
            try:
                if self._connection is not None and self._connection.poll():
                    self._end()  # it says nothing unasked: it died while idle, so this conversation is not to blame
                connection = self._connection or self._start()
                # marshal takes a tenth of JSON's time, during which this thread holds the GIL.
                data = marshal.dumps([self._seconds, one.most, list(one.messages), dict(one.variables)])
                return self._ask(connection, data, self._seconds)["text"]
            finally:
                with self._state:
                    self._running = None
                if one.cancelled:  # perhaps when its answer was already here: the process has been killed
                    self._end()

    def _cancel(self, one: _Rendering) -> None:
        """Kill the process if it renders this conversation, or do not begin; from any thread."""
        with self._state:
            one.cancelled = True
            if self._running is one and self._process is not None:
                self._process.kill()

    def _start(self) -> Connection:
        environment = {name: value for name, value in child_environment().items() if name in _VARIABLES}
        try:
            ours, child = socket.socketpair()
            with child, self._state:
                self._check_open()
                if self._running is not None and self._running.cancelled:
                    raise RenderingFailed(late=False)
                self._process = ChildProcess(
                    python_code(_CODE),
                    environment=environment,
                    stdin=child.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                self._connection = connection = Connection(ours.detach())
        except OSError as error:
            raise _not_started(str(error.strerror)) from None
        try:
            self._answer(connection, START_SECONDS)  # it has imported what it needs
        except RenderingFailed as error:
            raise _not_started(str(error)) from None
        try:
            self._ask(connection, self._setup, START_SECONDS)
        except RenderingFailed as error:
            raise RenderingFailed(error.late, starting=True) from None
        except RequestError:
            self._end()
            raise
        return connection

    def _ask(self, connection: Connection, data: bytes, seconds: float) -> dict[str, Any]:
        try:
            connection.send_bytes(data)
        except OSError:
            raise self._failed(late=False) from None
        return self._answer(connection, seconds)

    def _answer(self, connection: Connection, seconds: float) -> dict[str, Any]:
        try:
            if not connection.poll(seconds):
                raise self._failed(late=True)
            answer: dict[str, Any] = json.loads(connection.recv_bytes())
        except (OSError, EOFError):
            raise self._failed(late=False) from None
        if "memory" in answer:
            raise self._failed(late=False)
        if "refused" in answer:
            kind = TextTooLongError if answer["too_long"] else RequestError
            raise kind(*answer["refused"])
        return answer

    def _failed(self, late: bool) -> RenderingFailed:
        self._end()
        with self._state:
            self._check_open()
        return RenderingFailed(late)

    def _check_open(self) -> None:
        if self._stopped:
            raise EngineUnavailableError("the server is shutting down", "draining")

    def _end(self) -> None:
        with self._state:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            process.end()


def _not_started(reason: str) -> EngineUnavailableError:
    """Return the error of a request whose process did not start."""
    return EngineUnavailableError(f"the process for the chat template did not start ({reason})", "busy", 1.0)
