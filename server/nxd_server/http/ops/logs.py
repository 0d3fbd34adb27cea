"""Logs as text or JSON, and the access log: each request's id, route, status, time and error code.

Never logs a key, a query, or any part of a request's content: an error's message may quote the request, so only its
code and the name of the field are logged.
"""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from typing import TYPE_CHECKING, Any

from nxd_server.http.ops.log_writer import LogWriter

if TYPE_CHECKING:
    from nxd_server.http.error_responses import ApiError

EXTRA = "nxd"
"""Attribute of log records that holds their structured fields."""
access = logging.getLogger("nxd_server.access")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
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


def configure(log_format: str, level: str) -> None:
    """Log to standard error, once; uvicorn's own loggers use the same handler."""
    try:
        handler: logging.Handler = LogWriter(sys.stderr.fileno())
    except OSError:  # a stream of Python's own, in an interactive environment
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    for name in ("nxd_server", "nxd_infer", "uvicorn"):
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


def log_access(
    method: str,
    path: str,
    status: int,
    seconds: float,
    request_id: str,
    client: str,
    sent: int,
    refusal: ApiError | None = None,
) -> None:
    """Log one line for one request; ``refusal`` is the error of its response or at the end of its stream."""
    fields = {
        "method": method,
        "path": path,
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": request_id,
        "client": client,
        "bytes": sent,
    }
    error = ""
    if refusal is not None:
        fields |= {"error_type": refusal.type, "error_code": refusal.code}
        error = f" {refusal.type} {refusal.code}"
        if refusal.param is not None:
            fields["param"] = refusal.param if _FIELD.fullmatch(refusal.param) else "(not a field's name)"
            error += f" param={fields['param']}"
    line = "%s %s %d %.1f ms %s %s%s"
    access.info(line, method, path, status, seconds * 1e3, request_id, client, error, extra={EXTRA: fields})
