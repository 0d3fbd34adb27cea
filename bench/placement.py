"""The placement of this virtual machine's two cores: only measurements with the same placement are compared.

A host migrates a virtual machine's cores. Near each other, under one cache, they share one link to memory, and a word
takes about 45 ns from one to the other; apart, each has its own link, so up to twice the bandwidth, and the word takes
about 220 ns. Near cores halve the speed of memory-bound code and speed up frequent synchronisation, so a ratio of turns
with different placements means nothing. If cores do not migrate, nothing here ever waits.
"""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from bench.compiled import output
from bench.stats import summary
from bench.stream import read_bandwidth

T = TypeVar("T")

SAME = 2.0
"""Hops of one placement are within this factor of each other."""
PATIENCE = 600.0
"""Total seconds that a benchmark spends on waiting and on repeating turns; the last repetition is finished."""
TRIES = 4
"""Repetitions of one turn."""
PAUSE = 0.2


def read_hop() -> float:
    """Return the nanoseconds that a word takes from one core to the other; 0 with a single core, infinite if the two
    hardly ever run at once."""
    try:
        return float(output("hop", timeout=10.0))
    except subprocess.TimeoutExpired:
        return math.inf
    except subprocess.CalledProcessError as error:
        if error.returncode == 2:
            return 0.0
        raise


@dataclass
class Placement:
    """Keeps turns to the placement with the fastest memory among those seen."""

    seen: list[tuple[float, float]] = field(default_factory=list)
    """Bandwidth and hop, one reading after the other."""
    hop: Callable[[], float] = read_hop
    bandwidth: Callable[[], float] = read_bandwidth
    patience: float = PATIENCE

    def look(self, count: int = 3) -> None:
        """Read the placement ``count`` times; a bandwidth counts if the placement did not change meanwhile."""
        for _ in range(count):
            before, bandwidth, after = self.hop(), self.bandwidth(), self.hop()
            if _same(before, after):
                self.seen.append((bandwidth, after))

    def wanted(self) -> float | None:
        """The hop of the placement with the most bandwidth; None before the first reading."""
        if not self.seen:
            return None
        best = sorted(self.seen, reverse=True)[: (len(self.seen) + 3) // 4]
        return summary([hop for _, hop in best]).median

    def here(self) -> bool:
        """Return whether the cores have that placement now; False before the first reading."""
        wanted = self.wanted()
        return wanted is not None and _same(self.hop(), wanted)

    def held(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Run ``work()`` within the wanted placement; repeat it, within the limits, if the cores moved.

        Returns the last result and whether the placement was kept.
        """
        tries = 0
        while True:
            here, begin = self._wait(), time.monotonic()
            value, tries = work(), tries + 1
            held = here and self.here()
            if held or tries == TRIES or self.patience <= 0 or not self.seen:
                return value, held
            self.patience -= time.monotonic() - begin

    def _wait(self) -> bool:
        """Wait until the cores have the placement or the time is over; return whether they have it."""
        begin = time.monotonic()
        if not self.seen:
            return False
        while not (here := self.here()) and time.monotonic() - begin < self.patience:
            time.sleep(PAUSE)
        self.patience -= time.monotonic() - begin
        return here


def _same(one: float, other: float) -> bool:
    return max(one, other) <= SAME * min(one, other) and one < math.inf
