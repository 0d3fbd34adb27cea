"""Start real servers in processes of their own, and look at them from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[3]


class ServerProcess:
    """A server in a subprocess; ``lines`` is what it logged so far."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None):
        self.lines: list[str] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("NXD_INFER_API")}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=ROOT,
            env={**clean, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self._listening = threading.Event()
        self.reads = threading.Event()
        """While it is not set, what the server logs stays unread."""
        self.reads.set()
        self.port, self.scheme = 0, "http"
        # One client for all: making one loads certificates, which costs more than most requests here. No connection
        # expires: of many threads, one would close what the pool has just given to another.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=None)
        self._client = httpx.Client(timeout=600.0, verify=False, trust_env=False, limits=limits)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listening.wait(300.0):
            self.kill()
            raise AssertionError("the server never listened:\n" + self.log)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.reads.wait()
            self.lines.append(line.rstrip("\n"))
            if (found := re.search(r"listening on (https?)://[^ \"]*:(\d+)", line)) is not None:
                self.scheme, self.port = found.group(1), int(found.group(2))
                self._listening.set()
        self._listening.set()

    def wait_ready(self, seconds: float = 600.0) -> ServerProcess:
        def ready() -> bool:
            try:
                return self.get("/readyz").status_code == 200
            except httpx.TransportError:
                assert self.process.wait(60) is None, self.log  # it has ended
                raise

        wait_for(ready, seconds, self.log)
        return self

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self._client.get(self.url + path, **more)

    @property
    def headers(self) -> httpx.Headers:
        """Sent with each request."""
        return self._client.headers

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        if body is not None:
            more["json"] = body
        return self._client.post(self.url + path, **more)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over the label sets that contain ``labels``."""
        from prometheus_client.parser import text_string_to_metric_families

        total = 0.0
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    total += sample.value
        return total

    def wait_metric(self, name: str, value: float, seconds: float = 120.0, **labels: str) -> None:
        wait_for(lambda: self.metric(name, **labels) == value, seconds, f"{name} is not {value}")

    @property
    def inside(self) -> float:
        """Choices that run or wait."""
        return self.metric("nxd_num_requests_running") + self.metric("nxd_num_requests_waiting")

    def stop(self, number: int = signal.SIGTERM, seconds: float = 120.0) -> int:
        """Send a signal; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 120.0) -> int:
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the server did not end within {seconds} s:\n{self.log}") from None
        self._reader.join(60.0)
        return status

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(120)


def logged(capfd: Any, words: str) -> str:
    """What this process has written to standard error, once it has these words: a thread writes the log."""
    found: list[str] = []

    def has() -> bool:
        found.append(capfd.readouterr().err)
        return words in "".join(found)

    wait_for(has, message=f"{words!r} was not logged")
    return "".join(found)


def wait_for(condition: Any, seconds: float = 300.0, message: str = "") -> None:
    """``seconds`` guard against hanging: however busy the machine is, they are more than enough."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {message}"
        time.sleep(0.02)


@contextlib.contextmanager
def toy_server(*, wait: bool = True, toy: dict | None = None, arguments: tuple = (), env=None, **settings: Any):
    """The real server over the toy model, ready; more patient than by default, so that a busy machine makes nobody
    late."""
    patient = {"header_timeout": 600, "render_timeout": 60, "drain_timeout": 600, "keep_alive_interval": 600}
    settings = {"port": 0, **patient, **settings}
    command = [sys.executable, "-m", "tests.support.http.http_toy", "--settings", json.dumps(settings)]
    server = ServerProcess([*command, "--toy", json.dumps(toy or {}), *arguments], env)
    try:
        yield server.wait_ready() if wait else server
    finally:
        if server.process.poll() is None:
            server.kill()


@contextlib.contextmanager
def raw(
    server: ServerProcess, data: bytes = b"", timeout: float = 90.0, receive_buffer: int | None = None
) -> Iterator[socket.socket]:
    """A plain connection with ``data`` written to it; ``receive_buffer`` bytes wait unread at most on its side, and
    little on the server's, whose buffer grows with the size of segments: a third of a megabyte and not three."""
    with socket.socket() as connection:
        connection.settimeout(timeout)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # before it connects
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(data)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    parts = []
    while True:
        try:
            part = connection.recv(65536)
        except ConnectionResetError:
            break
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def http_request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events_of(text: str) -> list[Any]:
    """The data of server-sent events: parsed JSON, or the text ``[DONE]``. Asserts the framing."""
    assert text.endswith("\n\n")
    events = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def is_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> dict:
    """Assert OpenAI's error shape; the error."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    body = response.json()
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error
