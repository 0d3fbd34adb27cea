"""Watch a server while others attack it: ``python -m bench.watchers livez|stream --port N``.

One process per watcher, so that none waits for another. A line on standard input starts recording, the next one prints
the record as a line of JSON, and so on; at the end of input it prints the rest and exits.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass, field

LIVEZ = b"GET /livez HTTP/1.1\r\nHost: watched\r\nConnection: close\r\n\r\n"
LIVEZ_SECONDS = 30.0
PAUSE = 0.02


@dataclass
class Seen:
    seconds: list[float] = field(default_factory=list)
    """Latency of each ``/livez`` request, or the stream's gaps."""
    cut: int = 0
    """Requests that were rejected or cut."""


class Watcher:
    def __init__(self, port: int):
        self.port = port
        self.seen = Seen()
        self._input = b""

    def report(self) -> None:
        """Print what was seen since the last time, if requested; SystemExit at the end of input."""
        while select.select([0], [], [], 0.0)[0]:
            data = os.read(0, 1000)
            for _ in range(data.count(b"\n") or not data):
                print(json.dumps(asdict(self.seen)), flush=True)
                self.seen = Seen()
            if not data:
                raise SystemExit

    def livez(self) -> None:
        """Probe every 20 ms, each time on a new connection, like a kubelet."""
        while True:
            self.report()
            begun = time.perf_counter()
            try:
                with socket.create_connection(("127.0.0.1", self.port), LIVEZ_SECONDS) as connection:
                    connection.sendall(LIVEZ)
                    good = connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            except OSError:
                good = False
            self.seen.cut += not good
            self.seen.seconds.append(time.perf_counter() - begun)
            time.sleep(PAUSE)

    def streams(self, tokens: int) -> None:
        """Read one stream after another."""
        body = {"prompt": "hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        while True:
            self.report()
            good = False
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), LIVEZ_SECONDS) as connection,
            ):
                connection.sendall(head.encode() + data)
                good = self._stream(connection)
            if not good:
                self.seen.cut += 1
                time.sleep(0.1)

    def _stream(self, connection: socket.socket) -> bool:
        """Record the gaps of one stream, complete or not."""
        last, tail = None, b""
        while part := connection.recv(65536):
            now = time.perf_counter()
            tail = (tail + part)[-4096:]
            if not tail.startswith(b"HTTP/1.1 200 ") and last is None and b"data: " not in tail:
                return False
            if b'"text":' in part:
                if last is not None:
                    self.seen.seconds.append(now - last)
                last = now
            self.report()
        return b"data: [DONE]" in tail and b'"error":' not in tail


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.watchers", description=__doc__)
    parser.add_argument("what", choices=("livez", "stream"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream, default: %(default)s")
    given = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.nice(-5)  # waiting for a core must not count against the server
    watcher = Watcher(given.port)
    with contextlib.suppress(KeyboardInterrupt):
        watcher.livez() if given.what == "livez" else watcher.streams(given.tokens)


if __name__ == "__main__":
    sys.exit(main())
