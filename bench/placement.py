"""Where a host has put this machine's two cores: measurements are compared where it was the same place.

A virtual machine's cores are moved between the processor's. Side by side, under one cache, they share one link to
memory and a word goes from one to the other in some 45 ns; apart, they have a link each, so up to twice the bandwidth,
and the word takes some 220 ns. That halves what reads memory and speeds up what synchronises much, so a ratio of two
turns in different places says nothing. On a machine whose cores stay where they are, nothing here ever waits.
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
"""Hops of one place lie within this factor of each other."""
PATIENCE = 600.0
"""Seconds that a benchmark waits, and repeats turns, in all; the last repetition is finished."""
TRIES = 4
"""Of one turn."""
PAUSE = 0.2


def read_hop() -> float:
    """Nanoseconds a written word takes from one core to the other; 0 where there is one core only, infinite where the
    two hardly ever run at once."""
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
    """Holds turns to the place in which memory is fastest, of those that were seen."""

    seen: list[tuple[float, float]] = field(default_factory=list)
    """Bandwidth and hop, one reading after the other."""
    hop: Callable[[], float] = read_hop
    bandwidth: Callable[[], float] = read_bandwidth
    patience: float = PATIENCE

    def look(self, count: int = 3) -> None:
        """Read the place ``count`` times; the bandwidth counts where the place stayed meanwhile."""
        for _ in range(count):
            before, bandwidth, after = self.hop(), self.bandwidth(), self.hop()
            if _same(before, after):
                self.seen.append((bandwidth, after))

    def wanted(self) -> float | None:
        """The hop of the place with the most bandwidth; None before anything was seen."""
        if not self.seen:
            return None
        best = sorted(self.seen, reverse=True)[: (len(self.seen) + 3) // 4]
        return summary([hop for _, hop in best]).median

    def here(self) -> bool:
        """Whether the cores are there now; no where nothing was seen that they could be compared with."""
        wanted = self.wanted()
        return wanted is not None and _same(self.hop(), wanted)

    def held(self, work: Callable[[], T]) -> tuple[T, bool]:
        """``work()``, begun and ended in the wanted place; again, while there is patience, if the cores moved.

        Returns the last result and whether the place was held.
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
        """Until the cores are there or patience is at its end; whether they are."""
        begin = time.monotonic()
        if not self.seen:
            return False
        while not (here := self.here()) and time.monotonic() - begin < self.patience:
            time.sleep(PAUSE)
        self.patience -= time.monotonic() - begin
        return here


def _same(one: float, other: float) -> bool:
    return max(one, other) <= SAME * min(one, other) and one < math.inf
