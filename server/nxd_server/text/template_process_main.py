"""The main function of the process of a :class:`~nxd_server.text.template_process.BoundedTemplate`."""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_infer.processes.own import ignore_stop
from nxd_server.errors import RequestError, TextTooLongError
from nxd_server.text.chat_template import ChatTemplate

START_SECONDS = 30.0
TEMPLATE_MEMORY = 256 * 2**20
"""Bytes that may be allocated beyond what the process uses when it is ready."""


def main() -> None:
    """Render conversations until the server closes the connection, which is standard input."""
    ignore_stop()
    connection = Connection(os.dup(0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _end_in(START_SECONDS)
    _send(connection, {})  # it has started: what ends it from here on is what it reads
    setup = json.loads(connection.recv_bytes())
    _limit_memory()
    try:
        # Compile only in this process: jinja2 evaluates constants while it compiles, so compiling alone may never end.
        template = ChatTemplate(setup["source"], setup["special_tokens"], setup["named"])
    except ModelConfigError as error:
        _send(connection, {"refused": ["", str(error)], "too_long": False})
        return
    _end_in(None)
    _send(connection, {})
    while True:
        try:
            seconds, most, messages, variables = marshal.loads(connection.recv_bytes())  # nosec B302  # from the server
        except EOFError:
            return
        _end_in(seconds)
        try:
            answer = {"text": template.render(messages, max_characters=most, **variables)}
        except RequestError as error:
            answer = {"refused": [error.field, error.message], "too_long": isinstance(error, TextTooLongError)}
        except MemoryError:
            answer = {"memory": True}
        _end_in(None)
        _send(connection, answer)
        del messages, variables, answer


def _send(connection: Connection, answer: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _end_in(seconds: float | None) -> None:
    """Die shortly after ``seconds``, by SIGALRM, in case the server is no longer there to kill this process."""
    signal.setitimer(signal.ITIMER_REAL, 0.0 if seconds is None else seconds + 1.0)


def _limit_memory() -> None:
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + TEMPLATE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
