"""Run attacks on a server one after another, and measure their effect on other clients."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from bench.attackers import CHAT, COMPLETIONS, HELLO, TOKENIZE, Tally, Target
from bench.process_groups import memory_to_hold, tree
from nxd_infer.cli.demo.run import ready

LIVEZ_SECONDS = 0.1
GAP_STEPS = 5.0
MEMORY = 1.02
"""Limits that must hold during and after each attack."""
BACK_SECONDS = 20.0
"""Seconds within which resources taken by an attack must be given back."""
PATIENCE = 90.0
DEATHS = "rank deaths"
CUTS = (DEATHS, "swaps")
"""Attacks that end streams, or make new ones wait."""


@dataclass(frozen=True)
class Held:
    """Resources held by a server and all its children at one moment."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Held:
        descriptors = threads = 0
        memory = memory_to_hold(pid)
        for process in tree(pid):
            with contextlib.suppress(OSError):  # it ended meanwhile
                descriptors += len(os.listdir(f"/proc/{process}/fd"))
                threads += len(os.listdir(f"/proc/{process}/task"))
        return cls(memory, descriptors, threads)

    def grown(self, now: Held) -> list[str]:
        """Return the resources that ``now`` holds beyond the limits for an attack that started at this state."""
        pairs = (
            ("memory in MiB", self.memory / 2**20, now.memory / 2**20, self.memory * MEMORY / 2**20),
            ("descriptors", self.descriptors, now.descriptors, self.descriptors),
            ("threads", self.threads, now.threads, self.threads),
        )
        return [f"{what}: {after:.0f}, {before:.0f} before" for what, before, after, most in pairs if after > most]


@dataclass
class Reading:
    """The effect of one attack on other clients."""

    attack: str
    livez: list[float]
    gaps: list[float]
    step: float
    """Seconds of the stream's undisturbed step."""
    cut: int
    """Streams that were refused or cut."""
    tally: Mapping[str, Any]
    before: Held
    after: Held
    left: list[str] = field(default_factory=list)
    """Resources that were not given back."""

    @property
    def steps(self) -> float:
        """The longest gap, in steps."""
        return max(self.gaps, default=0.0) / self.step

    def wrong(self, gap_steps: float = GAP_STEPS, livez: float = LIVEZ_SECONDS) -> list[str]:
        """Return the violated limits."""
        found = list(self.left)
        if not self.livez:
            found.append("/livez was not answered")
        elif max(self.livez) > livez:
            found.append(f"/livez took {1e3 * max(self.livez):.0f} ms, at most {1e3 * livez:.0f}")
        if self.attack == DEATHS:
            pass  # a stream of lost ranks ends, or waits for new ones
        elif not self.gaps:
            found.append("no stream was served")
        elif self.steps > gap_steps:
            step = f"{1e3 * self.step:.1f} ms"
            found.append(f"a stream paused for {self.steps:.1f} steps of {step}, at most {gap_steps:g}")
        if self.cut and self.attack not in CUTS:
            found.append(f"{self.cut} streams were refused or cut")
        return [f"{self.attack}: {what}" for what in found]

    def row(self) -> tuple[str, ...]:
        """Return the row for a table."""
        livez = sorted(self.livez)
        answers = " ".join(f"{status}:{count}" for status, count in sorted(self.tally["answers"].items()))
        return (
            self.attack,
            str(sum(self.tally["sent"].values())),
            answers,
            f"{1e3 * livez[len(livez) * 99 // 100]:.0f} / {1e3 * livez[-1]:.0f}" if livez else "-",
            f"{1e3 * max(self.gaps, default=0):.0f}",
            f"{self.steps:.1f}",
            f"{self.before.memory / 2**20:.0f} / {self.after.memory / 2**20:.0f}",
            f"{self.before.descriptors} / {self.after.descriptors}",
            f"{self.before.threads} / {self.after.threads}",
        )


COLUMNS = ("attack", "sent", "answers", "/livez 99 % / longest, ms", "longest gap, ms", "steps", "MiB before / after",
           "descriptors", "threads")  # fmt: skip


class _Watch:
    """A watcher's process."""

    def __init__(self, what: str, port: int, tokens: int):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.watchers", what, "--port", str(port), "--tokens", str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        self.ask()

    def ask(self) -> dict[str, Any]:
        """Return what it has seen since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        try:
            self._process.communicate(timeout=PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()


class Siege:
    """Attacks on the server that is the process ``pid``.

    Args:
        more: further options of :mod:`bench.attackers`.
    """

    def __init__(self, port: int, pid: int, tokens: int = 200, **more: object):
        self.port = port
        self.pid = pid
        self._more = [f"--{name.replace('_', '-')}={value}" for name, value in more.items()]
        self._tokens = tokens

    @contextlib.contextmanager
    def _watched(self) -> Iterator[tuple[_Watch, _Watch]]:
        livez, stream = _Watch("livez", self.port, self._tokens), _Watch("stream", self.port, self._tokens)
        try:
            yield livez, stream
        finally:
            for watch in (livez, stream):
                with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
                    watch.end()

    def _held(self) -> Held:
        """Return what the server holds once its on-demand processes are started."""
        target = Target(self.port, 0.0, 0, "", (), Tally())
        target.ask(CHAT, json.dumps({"messages": HELLO, "max_tokens": 1}).encode())
        target.ask(TOKENIZE, json.dumps({"prompt": "hello " * 1000}).encode())
        target.ask(COMPLETIONS, json.dumps({"prompt": [5] * 40_000}).encode())  # parsed aside, rejected
        return Held.of(self.pid)

    def _ready(self) -> None:
        """Wait until its ranks run again, if the attack ended them."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if ready(self.port):
                return
            time.sleep(0.1)

    def attack(self, name: str, seconds: float, calm: float = 1.5) -> Reading:
        """Measure the stream's step for ``calm`` seconds, then run the attack, then check what it leaves behind.

        Blocks. Raises SystemExit if the attacker fails.
        """
        before = self._held()
        with self._watched() as (livez, stream):
            time.sleep(calm)
            livez.ask()
            peace = stream.ask()
            tally = self._run(name, seconds)
            alive, gaps = livez.ask(), stream.ask()
        step = statistics.median(peace["seconds"] or [float("nan")])
        self._ready()
        end = time.monotonic() + BACK_SECONDS
        while (left := before.grown(after := self._held())) and time.monotonic() < end:
            time.sleep(0.3)
        return Reading(name, alive["seconds"], gaps["seconds"], step, gaps["cut"], tally, before, after, left=left)

    def _run(self, name: str, seconds: float) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.attackers", name, "--port", str(self.port), f"--seconds={seconds}"]
        result = subprocess.run(
            [*command, *self._more],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
            timeout=seconds + PATIENCE,
        )
        if result.returncode:
            raise SystemExit(f"the attacker {name!r} ended with status {result.returncode}")
        return cast("dict[str, Any]", json.loads(result.stdout))
