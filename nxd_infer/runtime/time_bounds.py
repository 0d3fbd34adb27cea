"""How long the ranks of one artifact may take: from what they have taken on this machine.

A bound is there to notice what hangs. Work must never reach it, on a machine that is busy, or that has to read again
from disk what it held in memory the time before; so every bound leaves a multiple of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nxd_infer.artifact.manifest import BucketSpec
from nxd_infer.errors import InputMismatchError

START_SECONDS = 300.0
"""What a first start may take before anything of it is measured, beside the time to read the weights ..."""
SLOW_READ = 100e6
"""... at so many bytes a second: a hard disk, or a volume on a network."""
MARGIN = 6.0
"""What the ranks did in some seconds may take so many times as long on a machine that is busy."""
STEP_MARGIN = 10.0
"""The same for one step, which is short: something else may have the cores for all of it."""
KEPT = 0.9
"""How much of what the slowest step took is left after another step of its bucket: ten times less after 22."""
LEAST_SECONDS = 30.0
"""What starts processes and reads files may always take."""


def again(seconds: float, nbytes: int) -> float:
    """What may be taken by something that took ``seconds`` here and reads ``nbytes``, perhaps from disk this time."""
    return max(LEAST_SECONDS, MARGIN * seconds + nbytes / SLOW_READ)


class Bounds:
    """The bounds of ranks that hold ``nbytes`` of weights; :meth:`loaded` and :meth:`called` tell what was measured.

    ``call_timeout`` is what any call may take, however fast its bucket was seen to be; ``start_timeout`` what the ranks
    may take to load, or to take new weights (None: derived).
    """

    def __init__(
        self,
        buckets: Sequence[BucketSpec],
        nbytes: int,
        call_timeout: float,
        start_timeout: float | None = None,
    ):
        check_seconds("call_timeout", call_timeout)
        if start_timeout is not None:
            check_seconds("start_timeout", start_timeout)
        self.nbytes = nbytes
        self.call_timeout = call_timeout
        first_start = START_SECONDS + nbytes / SLOW_READ
        self.start = first_start if start_timeout is None else start_timeout
        self.longest_call = max(self.start, first_start, STEP_MARGIN * call_timeout)
        """What :meth:`call` never exceeds: a step that hangs must not be waited for as many times as long as a slow one
        took."""
        self.load_seconds: float | None = None
        """What the ranks took to start and load, the last time; None before the first."""
        self.least_load = math.inf
        """The fewest seconds in which the ranks have loaded, their files verified just before, and so in memory."""
        self._derives = start_timeout is None
        self.patient = False
        """Whether a call may take as long as a start while none was measured."""
        self._buckets = buckets
        self._slowest: dict[int, float] = {}
        self._warm: set[int] = set()
        """Buckets that have run since the ranks were started."""

    def loaded(self, seconds: float) -> None:
        """The ranks have started and loaded, in ``seconds``; everything runs for the first time again."""
        self.load_seconds = seconds
        self._warm.clear()

    def called(self, bucket: int, seconds: float) -> None:
        """A step of bucket number ``bucket`` took ``seconds``."""
        self._warm.add(bucket)
        self._slowest[bucket] = max(seconds, KEPT * self._slowest.get(bucket, 0.0))

    @property
    def load(self) -> float:
        """Seconds in which ranks start and load, read new weights, or use them: a start does all of that. What a first
        start may take, until one was measured."""
        known = self._derives and self.load_seconds is not None
        return again(self.load_seconds or 0.0, self.nbytes) if known else self.start

    def call(self, bucket: int) -> float:
        """Seconds that a step of bucket number ``bucket`` may take. Its first one may read weights from disk."""
        expected = self._expected(bucket)
        if expected is None:
            return max(self.call_timeout, self.start) if self.patient else self.call_timeout
        first = 0.0 if bucket in self._warm else MARGIN * (self.load_seconds or 0.0)
        return max(self.call_timeout, min(self.longest_call, STEP_MARGIN * expected + first))

    def _expected(self, bucket: int) -> float | None:
        """What a step takes, as measured; else as much as another one, more by as much as it has more input."""
        if bucket in self._slowest:
            return self._slowest[bucket]
        mine = self._buckets[bucket]
        return min(
            (seconds * max(1.0, _growth(self._buckets[other], mine)) for other, seconds in self._slowest.items()),
            default=None,
        )


def _growth(small: BucketSpec, large: BucketSpec) -> float:
    """How many times as large the input is that grows most from ``small`` to ``large``."""
    sizes = {spec.name: spec.nbytes for spec in small.inputs}
    return max((spec.nbytes / sizes[spec.name] for spec in large.inputs if sizes.get(spec.name)), default=1.0)


def check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputMismatchError(f"{name} is a positive number of seconds, got {value!r}")
