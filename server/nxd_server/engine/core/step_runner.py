"""One model's steps: run, timed, counted, and watched for hanging. One thread runs them; any thread may look."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import CollectiveError, ModelClosedError, NxdError, RankError
from nxd_infer.runtime.ranks.arena import InputBlock
from nxd_server.engine.core.model import Model, PendingStep, Tensors
from nxd_server.engine.core.step_costs import StepCosts

FATAL = (RankError, CollectiveError, ModelClosedError, ConnectionError)
"""Errors after which the ranks, and every state in them, are lost."""
WARM_SECONDS = 0.05
"""A graph that takes longer is run once at the start, which waits for all of them."""
OVERDUE_FACTOR = 20.0
OVERDUE_SECONDS = 5.0
"""A step is overdue after max(OVERDUE_SECONDS, OVERDUE_FACTOR x its measured time): the engine is not ready then."""
FIRST_SECONDS = 30.0
"""A graph that never ran may take so long, whatever it is estimated to cost: it touches memory for the first time."""


@dataclass(slots=True)
class StepInFlight:
    """A step on behalf of requests that the ranks have, or (``pending`` is None) that runs when it is waited for."""

    bucket: str
    inputs: Tensors
    pending: PendingStep | None
    work: Any
    """Whatever whoever began it wants to know at its end."""


class StepRunner:
    """Runs the buckets of ``model`` and remembers what happened."""

    def __init__(self, model: Model, clock: Callable[[], float] = time.monotonic):
        self.model = model
        self._clock = clock
        self.in_flight: deque[StepInFlight] = deque()
        """Steps that were begun and not finished, in order."""
        self.worked = False
        """Whether a step for requests has succeeded since the ranks were started."""
        self._started: float | None = None
        self._bucket = ""
        self._last: float | None = None
        # What steps on behalf of requests came to, by bucket.
        self.bucket_steps: Counter[str] = Counter()
        self.bucket_seconds: defaultdict[str, float] = defaultdict(float)
        self.useful_tokens: Counter[str] = Counter()
        self.padding_tokens: Counter[str] = Counter()

    # --- the engine's thread ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def visible(self, bucket: str) -> Iterator[None]:
        """What runs inside is a step of ``bucket`` to those who look; it counts as the last one when it succeeds."""
        self._bucket, self._started = bucket, self._clock()
        try:
            yield
        finally:
            self._started = None
        self._last = self._clock()

    def timed(self, bucket: str, inputs: Tensors) -> tuple[dict[str, Any], float]:
        """One execution on behalf of nobody, and its seconds: the ranks' own where they say so."""
        started = self._clock()
        with self.visible(bucket):
            if isinstance(inputs, InputBlock):
                step = self.model.begin_bucket(bucket, inputs)
                return step.result(), step.seconds
            outputs = self.model.run_bucket(bucket, inputs)
        return outputs, self._clock() - started

    def execute(self, bucket: str, inputs: Tensors, useful: int, padding: int) -> tuple[dict[str, Any], float]:
        """One execution on behalf of requests, and its seconds; ``useful`` and ``padding`` tokens are counted."""
        self.begin(bucket, inputs)
        return self.finish(useful, padding)

    def begin(self, bucket: str, inputs: Tensors, work: Any = None) -> None:
        """Hand a step to the ranks, where they take it at once (an InputBlock), behind those that they have.

        ``inputs`` are within their limits. They may be changed then; otherwise they are read at :meth:`finish`.
        """
        block = isinstance(inputs, InputBlock)
        pending = self.model.begin_bucket(bucket, inputs, checked=True) if block else None
        self.in_flight.append(StepInFlight(bucket, inputs, pending, work))
        if len(self.in_flight) == 1:
            self._bucket, self._started = bucket, self._clock()

    def finish(self, useful: int, padding: int) -> tuple[dict[str, Any], float]:
        """As :meth:`execute`, of the first step in flight. The outputs hold until the next one is begun."""
        step = self.in_flight[0]
        try:
            if step.pending is None:
                outputs, seconds = self.timed(step.bucket, step.inputs)
            else:
                outputs, seconds = step.pending.result(copy=False), step.pending.seconds
        finally:
            self.in_flight.popleft()
            self._started = None
        self._last = self._clock()
        if self.in_flight:
            self._bucket, self._started = self.in_flight[0].bucket, self._last
        self.worked = True
        bucket = step.bucket
        self.bucket_steps[bucket] += 1
        self.bucket_seconds[bucket] += seconds
        self.useful_tokens[bucket] += useful
        self.padding_tokens[bucket] += padding
        return outputs, seconds

    def forget(self) -> None:
        """The ranks are gone, and what they were given with them."""
        self.in_flight.clear()
        self._started = None

    def measure(self, bucket: str, inputs: Tensors) -> float:
        """Seconds that ``bucket`` takes: the faster of two executions.

        The first one touches its memory for the first time. A large graph is run once: that little is in its time, and
        steps for requests will correct it. The first graph of all is none for that: it warms up the ranks as well, and
        one that seems slow is never chosen, so that nothing would correct it.
        """
        cold = self._last is None
        seconds = self.timed(bucket, inputs)[1]
        return seconds if seconds > WARM_SECONDS and not cold else min(seconds, self.timed(bucket, inputs)[1])

    def check_alive(self) -> None:
        """Raises what ended the ranks, or RankError for one whose process is gone."""
        for rank in self.model.health():
            if not rank.alive:
                # Asked for after the ranks: the first end is told before the others are ended for it.
                first = self.model.failure
                if isinstance(first, NxdError):
                    raise first
                raise RankError(f"rank {rank.rank} is not running any more", rank.rank) from first

    # --- any thread -------------------------------------------------------------------------------------

    @property
    def age(self) -> float | None:
        """Seconds since the last step ended; None before the first."""
        return None if self._last is None else self._clock() - self._last

    @property
    def running_for(self) -> float | None:
        """Seconds since the step in flight began; None when there is none."""
        started = self._started
        return None if started is None else self._clock() - started

    def overdue(self, costs: StepCosts) -> str:
        """Why the step in flight takes too long, measured by ``costs``; empty when it does not."""
        running, bucket = self.running_for, self._bucket
        least = OVERDUE_SECONDS if not bucket or costs.measured(bucket) else FIRST_SECONDS
        limit = max(least, OVERDUE_FACTOR * costs.as_dict().get(bucket, 0.0))
        if running is None or running <= limit:
            return ""
        return f"a step of {bucket} has been running for {running:.1f} s (limit {limit:.1f} s)"
