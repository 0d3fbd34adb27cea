"""Time limits of an artifact's ranks, derived from what they have taken on this machine.

The limits detect hangs. Normal work must never reach them, even on a busy machine or if data must be read from disk
again, so every limit is a multiple of a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from nxd_infer.artifact.manifest import BucketSpec
from nxd_infer.errors import InputMismatchError
from nxd_infer.util.options import Option

START_SECONDS = 300.0
"""Limit of a first start before anything is measured, plus the time to read the weights ..."""
SLOW_READ = 100e6
"""... at this many bytes per second: a hard disk, or a network volume."""
CALL_SECONDS = 30.0
"""Minimum limit of a call where ``call_timeout`` is left out."""
MARGIN = 6.0
"""On a busy machine, work of some seconds may take this many times as long."""
STEP_MARGIN = 10.0
"""The same for one step, which is short: another process may hold the cores for all of it."""
KEPT = 0.9
"""Decay per step of a bucket's slowest time: by a factor of ten after 22 steps."""
LEAST_SECONDS = 30.0
"""Minimum limit for starting processes and reading files."""
LEAST_END_SECONDS = 5.0
"""Minimum limit for killed ranks to end ..."""
SLOW_FREE = 5e8
"""... and the bytes that they free per second at least; small pages were freed at 3 GiB/s."""


def again(seconds: float, nbytes: int) -> float:
    """Return the limit for repeating something that took ``seconds`` and reads ``nbytes``, perhaps from disk."""
    return max(LEAST_SECONDS, MARGIN * seconds + nbytes / SLOW_READ)


def until_ended(nbytes: int) -> float:
    """Return the limit for killed ranks that hold ``nbytes`` to end: the system has to free their memory."""
    return LEAST_END_SECONDS + nbytes / SLOW_FREE


class Bounds:
    """The limits of ranks that hold ``nbytes`` of weights; :meth:`loaded` and :meth:`called` record measurements.

    ``call_timeout`` is the minimum limit of a call, however fast its bucket is, and the limit of the first call, of
    which nothing is known (None: CALL_SECONDS, and as long as a first start). ``start_timeout`` limits loading and
    taking new weights (None: derived).
    """

    def __init__(
        self,
        buckets: Sequence[BucketSpec],
        nbytes: int,
        call_timeout: float | None = None,
        start_timeout: float | None = None,
        stages: int = 1,
    ):
        """``stages``: of a pipeline; a step takes as long as its slowest stage, once in each."""
        if call_timeout is not None:
            check_seconds("call_timeout", call_timeout)
        if start_timeout is not None:
            check_seconds("start_timeout", start_timeout)
        self.nbytes = nbytes
        self.call_timeout = CALL_SECONDS if call_timeout is None else call_timeout
        first_start = START_SECONDS + nbytes / SLOW_READ
        self.start = first_start if start_timeout is None else start_timeout
        self.longest_call = max(self.start, first_start, STEP_MARGIN * self.call_timeout)
        """:meth:`call` never exceeds this: after a slow step, a hanging one must not be waited for ten times as
        long."""
        self.load_seconds: float | None = None
        """Time of the last start and load of the ranks; None before the first."""
        self._derives = start_timeout is None
        self.patient = call_timeout is None
        """Whether a call may take as long as a start until one is measured: it may compile, or read all weights from
        disk."""
        self._buckets = buckets
        self._margin = STEP_MARGIN * stages
        self._slowest: dict[int, float] = {}
        self._warm: set[int] = set()
        """Buckets that have run since the ranks were started."""

    def loaded(self, seconds: float) -> None:
        """Record that the ranks have started and loaded in ``seconds``; every bucket's next run is a first run."""
        self.load_seconds = seconds
        self._warm.clear()

    def called(self, bucket: int, seconds: float) -> None:
        """Record that a step of bucket number ``bucket`` took ``seconds``."""
        self._warm.add(bucket)
        self._slowest[bucket] = max(seconds, KEPT * self._slowest.get(bucket, 0.0))

    @property
    def load(self) -> float:
        """Seconds for the ranks to start and load, read new weights, or use them (a start includes all of these). Until
        a start is measured, the limit of a first start."""
        known = self._derives and self.load_seconds is not None
        return again(self.load_seconds or 0.0, self.nbytes) if known else self.start

    def call(self, bucket: int) -> float:
        """Return the limit of a step of bucket number ``bucket``. Its first step may read weights from disk."""
        expected = self._expected(bucket)
        if expected is None:
            return max(self.call_timeout, self.start) if self.patient else self.call_timeout
        first = 0.0 if bucket in self._warm else MARGIN * (self.load_seconds or 0.0)
        return max(self.call_timeout, min(self.longest_call, self._margin * expected + first))

    def _expected(self, bucket: int) -> float | None:
        """Return the measured time of a step, else that of another bucket, scaled by the ratio of their inputs."""
        if bucket in self._slowest:
            return self._slowest[bucket]
        own = self._buckets[bucket]
        return min(
            (seconds * max(1.0, _growth(self._buckets[other], own)) for other, seconds in self._slowest.items()),
            default=None,
        )


def _growth(small: BucketSpec, large: BucketSpec) -> float:
    """Return the size ratio of the input that grows most from ``small`` to ``large``."""
    sizes = {spec.name: spec.nbytes for spec in small.inputs}
    return max((spec.nbytes / sizes[spec.name] for spec in large.inputs if sizes.get(spec.name)), default=1.0)


def check_seconds(name: str, value: Any) -> None:
    """Raise InputMismatchError unless ``value`` is a number of seconds above 0."""
    Option(MISSING, "", float, above=0, unit="seconds").checked(name, value, InputMismatchError)
