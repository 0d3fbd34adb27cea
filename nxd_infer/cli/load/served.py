"""An artifact that a command serves for itself, on this machine."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator
from pathlib import Path

from nxd_infer.cli.load.streams import ServerError
from nxd_infer.processes.child import ChildProcess, end_all, end_of_log
from nxd_infer.processes.command import child_environment, python_module

READY_TIMEOUT, STOP_TIMEOUT = 120.0, 30.0


@contextlib.contextmanager
def server(artifact: Path, port: int, log: Path) -> Iterator[ChildProcess]:
    """Run a server process inside the block; end it with SIGTERM, or SIGKILL if that does not work."""
    command = python_module("nxd_infer.cli.main", "serve", str(artifact), "--port", str(port))
    with log.open("wb") as output:
        process = ChildProcess(command, environment=child_environment(), stdout=output, stderr=output)
        try:
            yield process
        finally:
            end_all([process], patience=STOP_TIMEOUT)


def wait_ready(process: ChildProcess, port: int, log: Path, timeout: float = READY_TIMEOUT) -> float:
    """Return the seconds until the server is ready. Raises ServerError with the end of its log on timeout."""
    start = time.monotonic()
    while not ready(port):
        if not process.running or time.monotonic() - start > timeout:
            state = "ended" if not process.running else f"is not ready after {timeout:.0f} s"
            raise ServerError(f"the server {state}; the end of its log:\n{end_of_log(log)}")
        time.sleep(0.05)
    return time.monotonic() - start


def ready(port: int) -> bool:
    """Return whether ``/readyz`` answers 200 now."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()
