"""Logs as text or JSON, and the access log: each request's id, route, status, time and error code.

Never logs a key, a query, or any part of a request's content: an error's message may quote the request, so only its
code and the name of the field are logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nxd_server.http.scope_keys import KEY, REFUSAL, REQUEST_ID

if TYPE_CHECKING:
    from starlette.types import Scope

EXTRA = "nxd"
"""Attribute of log records that holds their structured fields."""
access = logging.getLogger("nxd_server.access")
LINES = 4096
"""Lines that may wait to be written; further ones are dropped."""
FLUSH_SECONDS = 1.0
RETRY_SECONDS = 0.05


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, EXTRA, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """One line per record: a client's path or header cannot forge another line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name == access.name:  # contains client data; other messages may span lines
            record.message = record.message.encode("unicode_escape").decode("ascii")
        return super().formatMessage(record)


MOST_KNOWN = 100
"""Messages that :class:`Seldom` remembers."""


class Seldom(logging.Filter):
    """Of the equal messages of one of OpenTelemetry's loggers, lets a first one pass, and then one in so many
    ``seconds``, with the number of those left out: a receiver that is gone is reported whenever it is tried."""

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic):
        super().__init__("opentelemetry")
        self._seconds, self._clock = seconds, clock
        self._known: dict[tuple[str, int, str], tuple[float, int]] = {}
        """When the next one may pass, and how many were left out since the last."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not super().filter(record):
            return True  # another library's, or our own
        key, now = (record.name, record.levelno, str(record.msg)), self._clock()
        if len(self._known) > MOST_KNOWN and key not in self._known:
            self._known.clear()
        due, left_out = self._known.get(key, (now, 0))
        self._known[key] = (due, left_out + 1) if now < due else (now + self._seconds, 0)
        if now >= due and left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more since the last such line)", ()
        return now >= due


def configure(log_format: str, level: str) -> None:
    """Log to standard error, once; uvicorn's own loggers and OpenTelemetry's use the same handler."""
    try:
        handler: logging.Handler = LogWriter(sys.stderr.fileno())
    except OSError:  # a stream of Python's own, in an interactive environment
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(Seldom())
    for name in ("nxd_server", "nxd_infer", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        for former in logger.handlers:
            former.close()
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    # Its warnings quote what clients send, which would fill the log.
    logging.getLogger("uvicorn").setLevel(max(logging.ERROR, logging.getLogger("uvicorn").level))


def flush() -> None:
    """Wait until all lines have been written, but no longer than a second."""
    for handler in logging.getLogger("nxd_server").handlers:
        handler.flush()


_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,80}")
"""Pattern of a field's name. Clients choose some of these names; this rejects free text."""


def log_access(scope: Scope, status: int, seconds: float, sent: int) -> None:
    """Log one line for one request, with the error of its response or at the end of its stream."""
    client = scope.get("client")
    fields = {
        **{name: scope[name] for name in ("method", "path")},
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": scope[REQUEST_ID],
        "client": client[0] if client else "-",
        "bytes": sent,
    }
    if KEY in scope:
        fields["key"] = scope[KEY].name
    error, refusal = "", scope.get(REFUSAL)
    if refusal is not None:
        fields |= {"error_type": refusal.type, "error_code": refusal.code}
        error = f" {refusal.type} {refusal.code}"
        if refusal.param is not None:
            fields["param"] = refusal.param if _FIELD.fullmatch(refusal.param) else "(not a field's name)"
            error += f" param={fields['param']}"
    shown = fields["method"], fields["path"], status, seconds * 1e3, fields["request_id"], fields["client"], error
    access.info("%s %s %d %.1f ms %s %s%s", *shown, extra={EXTRA: fields})


class LogWriter(logging.Handler):
    """Formats records in the caller's thread, and writes them to a copy of a descriptor in its own: a full pipe that
    nobody reads must not stop the event loop.

    Lines that find ``limit`` others waiting are dropped and counted; one line says how many, once all before it have
    been written.
    """

    def __init__(self, descriptor: int, limit: int = LINES):
        super().__init__()
        self._descriptor, self._limit = os.dup(descriptor), limit
        self._waiting: queue.SimpleQueue[str | threading.Event | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nxd-log", daemon=True)
                self._thread.start()
            with self._counting:
                if self._waiting.qsize() < self._limit:
                    self._waiting.put(line)
                else:
                    self._dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything has been written, but at most a second: nobody may be reading."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._waiting.put(written)
            written.wait(FLUSH_SECONDS)

    def close(self) -> None:
        self.flush()
        self._waiting.put(None)  # the descriptor is the thread's, which may be writing
        super().close()

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            if isinstance(line, str):
                self._write(line)
            if self._dropped and self._waiting.empty():
                self._report()
            if isinstance(line, threading.Event):
                line.set()
        if self._dropped:
            self._report()
        os.close(self._descriptor)

    def _report(self) -> None:
        with self._counting:
            dropped, self._dropped = self._dropped, 0
        text = "%d lines of the log were dropped, because standard error was full and nobody read it"
        record = logging.LogRecord("nxd_server", logging.WARNING, __file__, 0, text, (dropped,), None)
        self._write(self.format(record))

    def _write(self, line: str) -> None:
        # Not through sys.stderr: a thread that holds its lock when the interpreter ends would abort the process.
        left = memoryview((line + "\n").encode(errors="backslashreplace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process has made the pipe non-blocking
                time.sleep(RETRY_SECONDS)
            except OSError:  # its reader has gone
                return
