"""Our side of a peer: start its process, send requests, and wait with a timeout."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process_groups import ROOT, Group


class PeerError(Exception):
    """A peer that cannot take part: missing, broken, dead or too slow. The message says which."""


@dataclass(frozen=True)
class Run:
    """Result of one run of some prompts."""

    tokens: list[list[int]]
    times: list[list[float]]
    """Time of each token of each row, in seconds after the call."""

    @property
    def first(self) -> float:
        """Seconds until every row had its first token: the prefill of all prompts."""
        return max(row[0] for row in self.times)

    @property
    def rate(self) -> float:
        """Tokens per second while every row decodes: from the last row's first token to the first row's last.

        Raises PeerError if there is no such time, because the first row ended before the last one started.
        """
        begin, end = self.first, min(row[-1] for row in self.times)
        count = sum(begin < moment <= end for row in self.times for moment in row)
        if count < len(self.times):
            raise PeerError("no moment at which all rows decoded: the first had ended before the last began")
        return count / (end - begin)


class Peer:
    """A process that speaks the protocol; stopped except during a request."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, env: dict[str, str] | None = None, cwd: Path = ROOT
    ):
        self.name = name
        self.version = ""
        self.start_seconds = 0.0
        self.group = Group(command, log, env={**os.environ, **(env or {})}, pipes=True, cwd=cwd)
        self._buffer = b""

    def start(self, timeout: float, **arguments: Any) -> None:
        """Load the model. Raises PeerError."""
        begin = time.perf_counter()
        self.version = self.ask("start", timeout, **arguments)["version"]
        self.start_seconds = time.perf_counter() - begin

    def run(self, prompts: list[list[int]], new_tokens: int, timeout: float = 120.0) -> Run:
        """Continue every prompt by exactly ``new_tokens`` greedy tokens. Raises PeerError."""
        run = Run(**self.ask("run", timeout, prompts=prompts, new_tokens=new_tokens))
        for part in (run.tokens, run.times):
            if [len(row) for row in part] != [new_tokens] * len(prompts):
                raise PeerError(f"{self.name} gave {[len(row) for row in part]} tokens, not {new_tokens} per row")
        return run

    def ask(self, operation: str, timeout: float, **arguments: Any) -> Any:
        """Send a request and return the answer. A peer that is dead or too slow is ended: PeerError."""
        line = json.dumps({"op": operation, **arguments}) + "\n"
        if not self.group.alive():
            raise PeerError(f"{self.name} ended:\n{self.group.tail()}")
        with self.group.awake():
            try:
                self.group.stdin.write(line.encode())
                self.group.stdin.flush()
            except OSError as error:
                raise PeerError(f"{self.name} ended:\n{self.group.tail()}") from error
            answer = json.loads(self._line(time.monotonic() + timeout, timeout))
        if "error" in answer:
            raise PeerError(f"{self.name} failed:\n{answer['error']}")
        return answer["ok"]

    def _line(self, deadline: float, timeout: float) -> bytes:
        output = self.group.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                self.group.kill()
                raise PeerError(f"{self.name} did not answer within {timeout:.0f} s:\n{self.group.tail()}")
            piece = os.read(output, 1 << 20)
            if not piece:
                raise PeerError(f"{self.name} ended:\n{self.group.tail()}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        """Ask the peer to quit, and end whatever is left of it."""
        self.group.resume()
        try:
            if self.group.alive():
                self.group.stdin.write(b'{"op": "quit"}\n')
                self.group.stdin.close()
                self.group.process.wait(10)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{self.name} did not end by itself ({type(error).__name__}); it is killed")
        finally:
            self.group.kill()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
