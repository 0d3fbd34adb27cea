"""Attacks on a server: ``python -m bench.attackers NAME --port N --seconds S``, one process per attack.

Uses only the standard library. At the end an attacker prints what it sent as one line of JSON (:class:`Tally`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE, WEIGHTS = "/tokenize", "/detokenize", "/v1/weights"
HELLO = [{"role": "user", "content": "hello"}]
IDLE, SLOW, STALLED, LEAVING = 220, 60, 130, 6
ANSWER_SECONDS = 60.0
ABORTED_TOKENS = 40
MIB = 2**20
SPIN = "{% if spin %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
"""Part of the attacked model's chat template: the variable ``spin`` makes it loop endlessly."""


@dataclass
class Tally:
    """What the attacker sent. The server may not count requests whose client left early."""

    sent: Counter[str] = field(default_factory=Counter)
    """Requests by route."""
    answers: Counter[str] = field(default_factory=Counter)
    """Awaited requests by status; ``cut`` if the server closed the connection."""


@dataclass(frozen=True)
class Target:
    port: int
    until: float
    """On ``time.monotonic``'s clock."""
    body_bytes: int
    """The server's limit."""
    admin: str
    checkpoints: tuple[str, ...]
    tally: Tally

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.until

    def connect(self, data: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), ANSWER_SECONDS)
        if data:
            connection.sendall(data)
        return connection

    def send(self, path: str, body: bytes, *headers: str, length: int | None = None) -> socket.socket:
        """Send a request without waiting for the answer."""
        self.tally.sent[path] += 1
        return self.connect(head(path, len(body) if length is None else length, *headers) + body)

    def ask(self, path: str, body: bytes, *headers: str, length: int | None = None) -> int:
        """Send a request, wait for its answer and return the status, 0 if there is none."""
        data = b""
        with (
            contextlib.suppress(OSError),
            self.send(path, body, "Connection: close", *headers, length=length) as connection,
        ):
            while part := connection.recv(65536):
                data = data or part
        status = data.split(b" ", 2)[1].decode() if data.startswith(b"HTTP/1.1 ") else "cut"
        self.tally.answers[status] += 1
        return int(status) if status.isdigit() else 0


def head(path: str, length: int, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: attacked", f"Content-Length: {length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def idle(target: Target) -> None:
    """Hold 220 silent connections; reopen those that the server closes."""
    _hold(target, IDLE, lambda: target.connect(), b"")


def slow_heads(target: Target) -> None:
    """Send 60 request heads byte by byte."""
    _hold(target, SLOW, lambda: target.connect(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: "), b"a")


def slow_bodies(target: Target) -> None:
    """Send 60 bodies byte by byte."""
    _hold(target, SLOW, lambda: target.send(COMPLETIONS, b'{"prompt": "', length=10**6), b"a")


def stalled_bodies(target: Target) -> None:
    """Send 130 bodies of 2 MiB without their last byte: together the server's limit for all bodies."""
    body = b'{"prompt": "' + b"a" * (2 * MIB)
    _hold(target, STALLED, lambda: target.send(COMPLETIONS, body, length=len(body) + 1), b"")


def _hold(target: Target, count: int, opened: Callable[[], socket.socket], drop: bytes) -> None:
    held: list[socket.socket] = []
    while not target.over:
        for connection in list(held):
            try:
                connection.setblocking(False)
                if drop:
                    connection.sendall(drop)
                with contextlib.suppress(BlockingIOError):
                    if not connection.recv(4096):
                        raise ConnectionError
            except OSError:
                held.remove(connection)
                connection.close()
        while len(held) < count and not target.over:
            with contextlib.suppress(OSError):
                held.append(opened())
        time.sleep(0.2)
    for connection in held:
        connection.close()


def _again(path: str, make: Callable[[int], bytes]) -> Callable[[Target], None]:
    """Send one body of almost the maximum size, again and again."""

    def attack(target: Target) -> None:
        body = make(target.body_bytes - 200)
        target.ask(path, body)  # at least once: building it takes a while
        while not target.over:
            target.ask(path, body)

    return attack


def _many(before: bytes, value: bytes, after: bytes, most: int | None = None) -> Callable[[int], bytes]:
    """Repeat ``value`` as often as it fits, at most ``most`` times."""

    def make(size: int) -> bytes:
        count = (size - len(before) - len(after)) // (len(value) + 1)
        count = count if most is None else min(most, count)
        return before + b",".join([value] * count) + after

    return make


def _variables(size: int) -> bytes:
    names = ",".join(f'"v{number}":1' for number in range(min(10**6, size // 12)))
    return b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {' + names.encode() + b"}}"


def _one_text(letter: bytes) -> Callable[[int], bytes]:
    return lambda size: b'{"prompt": "' + letter * ((size - 20) // len(letter)) + b'"}'


MESSAGE = b'{"role":"user","content":"a"}'
PART = b'{"type":"text","text":"a"}'
VARIABLES = b'{"max_tokens": 1, "messages": [' + MESSAGE + b'], "chat_template_kwargs": {"a": ['


def abandoned(target: Target) -> None:
    """Ask to tokenise six long texts at a time, and leave."""
    body = json.dumps({"prompt": "while it runs. " * (min(6 * MIB, target.body_bytes - 200) // 15)}).encode()
    while not target.over:
        several = []
        with contextlib.suppress(OSError):
            several = [target.send(TOKENIZE, body) for _ in range(LEAVING)]
            time.sleep(0.1)
        for connection in several:
            connection.close()


def aborted(target: Target) -> None:
    """Open streams and leave after their first bytes."""
    body = {"prompt": "hello", "max_tokens": ABORTED_TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
    while not target.over:
        with contextlib.suppress(OSError), target.send(COMPLETIONS, json.dumps(body).encode()) as connection:
            connection.recv(300)
        time.sleep(0.02)


def keyless(target: Target) -> None:
    """Send an endless body to a route without having its key."""
    block = b"a" * MIB
    while not target.over:
        with contextlib.suppress(OSError), target.send(WEIGHTS, b"", length=10**12) as connection:
            while not target.over:
                connection.sendall(block)


def loops(target: Target) -> None:
    """Send conversations whose template never ends; half of the clients leave."""
    body = json.dumps({"messages": HELLO, "max_tokens": 1, "chat_template_kwargs": {"spin": 1}}).encode()
    while not target.over:
        several = []
        with contextlib.suppress(OSError):
            several = [target.send(CHAT, body) for _ in range(4)]
            time.sleep(0.5)
        for connection in several:
            connection.close()


def swaps(target: Target) -> None:
    """Swap weights as often as running requests allow."""
    number = 0
    while not target.over:
        number += 1
        path = target.checkpoints[number % len(target.checkpoints)]
        body = json.dumps({"path": path, "timeout": 5}).encode()
        target.ask(WEIGHTS, body, f"Authorization: Bearer {target.admin}")
        time.sleep(0.2)


def deaths(target: Target) -> None:
    """Kill a rank whenever the server is ready."""
    while not target.over:
        with contextlib.suppress(OSError, ValueError, IndexError), target.connect() as connection:
            target.tally.sent["/health"] += 1
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
            if answer.split(b" ", 2)[1] == b"200":
                ranks = json.loads(answer.split(b"\r\n\r\n", 1)[1])["ranks"]
                pids = [rank["pid"] for rank in ranks if rank["pid"]]
                os.kill(pids[-1], signal.SIGKILL)
        time.sleep(1.0)


def busy(target: Target) -> None:
    """No attack: a busy process that never contacts the server, to measure the cost of sharing the cores."""
    while not target.over:
        sum(range(10_000))


def nothing(target: Target) -> None:
    """Do nothing."""
    time.sleep(max(0.0, target.until - time.monotonic()))


ATTACKS: dict[str, Callable[[Target], None]] = {
    "nothing": nothing,
    "busy": busy,
    "idle": idle,
    "slow heads": slow_heads,
    "slow bodies": slow_bodies,
    "stalled bodies": stalled_bodies,
    "prompts": _again(COMPLETIONS, _many(b'{"prompt": [', b"[1]", b"]}")),
    "ids": _again(DETOKENIZE, _many(b'{"tokens": [', b"5", b"]}", 8_000_000)),
    "variables": _again(CHAT, _variables),
    "stops": _again(COMPLETIONS, _many(b'{"prompt": "a", "stop": [', b'""', b"]}", 5_000_000)),
    "text": _again(COMPLETIONS, _one_text(b"a")),
    "escapes": _again(COMPLETIONS, _one_text(b"\\u4e2d\\n")),
    # The most that is parsed, by a server whose model takes 4,096 tokens:
    "parsed ids": _again(COMPLETIONS, _many(b'{"prompt": [', b"12345", b"]}", 2**18)),
    "parsed lists": _again(COMPLETIONS, _many(b'{"prompt": [', b"[1]", b"]}", 2**14 - 10)),
    "parsed stops": _again(COMPLETIONS, _many(b'{"prompt": "a", "stop": [', b'"ab"', b"]}", 2**18)),
    "parsed variables": _again(CHAT, _many(VARIABLES, b"12345", b"]}}", 2**18)),
    # The most that reaches validation:
    "wrong ids": _again(DETOKENIZE, _many(b'{"tokens": [', b"1.5", b"]}", 2**18)),
    "most ids": _again(COMPLETIONS, _many(b'{"prompt": [', b"12345", b"]}", 2**16)),
    "most lists": _again(COMPLETIONS, _many(b'{"prompt": [', b"[1]", b"]}", 2**10)),
    "most stops": _again(COMPLETIONS, _many(b'{"prompt": "a", "stop": [', b'"ab"', b"]}", 2**10)),
    "most messages": _again(CHAT, _many(b'{"max_tokens": 1, "messages": [', MESSAGE, b"]}", 2**12)),
    "most parts": _again(
        CHAT, _many(b'{"max_tokens": 1, "messages": [{"role":"user","content":[', PART, b"]}]}", 10_000)
    ),
    "most variables": _again(CHAT, _many(VARIABLES, b"12345", b"]}}", 4000)),
    "most text": _again(COMPLETIONS, lambda size: _one_text(b"a")(min(size, MIB))),
    "abandoned texts": abandoned,
    "aborted streams": aborted,
    "keyless bodies": keyless,
    "template loops": loops,
    "swaps": swaps,
    "rank deaths": deaths,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.attackers", description=__doc__)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--body-bytes", type=int, default=16 * MIB)
    parser.add_argument("--admin", default="", help="the admin key, for `swaps`")
    parser.add_argument("--checkpoints", default="", help="what `swaps` loads, alternating")
    given = parser.parse_args()
    tally = Tally()
    checkpoints = tuple(filter(None, given.checkpoints.split(",")))
    until = time.monotonic() + given.seconds
    ATTACKS[given.name](Target(given.port, until, given.body_bytes, given.admin, checkpoints, tally))
    print(json.dumps(vars(tally)))


if __name__ == "__main__":
    main()
