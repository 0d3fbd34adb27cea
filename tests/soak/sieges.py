"""Attacks between the rounds of traffic, each on an idle server but for one stream: what those notice who watch."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

from bench.attackers import ATTACKS
from bench.siege import LIVEZ_SECONDS, Reading, Siege
from tests.soak.operators import breaker, swapper
from tests.soak.state import BODY_BYTES, GRACE, Soak
from tests.soak.tasks import all_of
from tests.soak.wire import Violation

SECONDS, OUR_SECONDS, AT_ONCE = 4.0, 10.0, 4
"""Of each attack, of those of the operators, who pause between, and how many there are after a round."""
GAP_STEPS, STEP_SECONDS = 4.0, 0.02
"""A stream's pauses in steps; a step of this model takes less than the system lets one process run before another, so
what counts is the step of a model that is worth an attack."""
TOKENS = 60
OURS: dict[str, Any] = {"swaps": swapper, "rank deaths": breaker}
"""Attacks that the operators do themselves, as the books must know of each."""


class Sieges:
    def __init__(self, soak: Soak, pid: int, seed: int):
        self._soak = soak
        self._pid = pid
        self._rng = random.Random(seed)
        names = [name for name in ATTACKS if name not in ("nothing", "busy")]
        self._rng.shuffle(names)
        self._next: Iterator[str] = itertools.cycle(names)
        self._patience = max(1.0, soak.grace / GRACE)
        self._busy: float | None = None
        """The longest pause, in seconds, beside a process that uses a core and never speaks to the server: where the
        attacker shares the ranks' cores, no server can keep its streams from that."""
        self.worst: dict[str, tuple[float, float]] = {}
        """By attack, the longest look at ``/livez`` and the longest pause of a stream, in seconds."""

    async def some(self) -> None:
        """The next attacks; Violation when one is noticed more than it may be."""
        if self._busy is None:
            self._busy = max((await self._read("busy")).gaps, default=0.0)
        for _ in range(AT_ONCE):
            await self._attack(next(self._next))

    async def _attack(self, name: str) -> None:
        """What the system does to a stream once, an attack does again: what is late is tried a second time."""
        reading = await self._read(name)
        if not reading.left and not reading.cut and self._wrong(reading):
            reading = await self._read(name)
        if wrong := self._wrong(reading):
            raise Violation("; ".join(wrong))

    def _wrong(self, reading: Reading) -> list[str]:
        steps = max(GAP_STEPS, (self._busy or 0.0) / reading.step)
        return reading.wrong(steps * self._patience, LIVEZ_SECONDS * self._patience)

    async def _read(self, name: str) -> Reading:
        siege = Siege(self._soak.port, self._pid, TOKENS, body_bytes=BODY_BYTES)
        watched = asyncio.to_thread(siege.attack, *(("nothing", OUR_SECONDS) if name in OURS else (name, SECONDS)))
        if name in OURS:
            until = time.monotonic() + OUR_SECONDS
            reading, _ = await asyncio.gather(watched, all_of(OURS[name](self._soak, self._rng, until)))
        else:
            reading = await watched
        self._count(reading, siege)
        livez, gap = self.worst.get(name, (0.0, 0.0))
        self.worst[name] = max([livez, *reading.livez]), max([gap, *reading.gaps])
        # After the operators there are other ranks and other weights: `calm` looks at those.
        left = [] if name in OURS else reading.left
        return dataclasses.replace(reading, attack=name, step=max(reading.step, STEP_SECONDS), left=left)

    def _count(self, reading: Reading, siege: Siege) -> None:
        """What was sent, of which the server may have counted anything."""
        books = self._soak.books
        for tally in (reading.tally, vars(siege.tally)):
            for route, count in tally["sent"].items():
                books.sent[route] += count
                books.left[route] += count
            books.open_choices += tally["choices"]
            books.open_tokens += tally["tokens"]
        books.kinds["attack"] += 1

    def summary(self) -> str:
        """The worst of all attacks so far."""
        livez, gaps = zip(*self.worst.values(), strict=True) if self.worst else ((0.0,), (0.0,))
        return f"under attack /livez {1e3 * max(livez):.0f} ms and pauses of {1e3 * max(gaps):.0f} ms at most"
