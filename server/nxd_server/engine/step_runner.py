"""Runs one model's steps: timed, counted, and watched for hangs; before requests and between them, too. One thread runs
them; any thread may read. What they cost decides which graph is taken.

Before the engine is ready, the smallest graph runs, which shows that the ranks work and loads their weights; then
others, smallest first, as long as they fit into ``WARM_UP_SECONDS``. The rest have estimated costs until they first
run: for a request, or, one at a time, when the engine has been idle for as long as such a step takes, so that a request
that arrives at random rarely waits for one. Measured costs survive a restart of the ranks, so one graph then suffices.

The cost of a graph that has not run yet is estimated from those that have, so every graph has one. Estimates are on
the high side (cost is assumed to be almost proportional to tokens), so that a large graph does not stall streams;
and a little below proportional, so that it is tried if it would be full. Its first execution corrects the estimate.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from nxd_infer.artifact.manifest import BucketSpec
from nxd_infer.errors import CollectiveError, ModelClosedError, NxdError, RankError
from nxd_infer.processes.child import END_SECONDS
from nxd_infer.runtime.ipc import InputBlock
from nxd_infer.runtime.rank_model import RankModel
from nxd_infer.runtime.ranks import PendingStep

FATAL = (RankError, CollectiveError, ModelClosedError, ConnectionError)
"""Errors after which the ranks, and all their states, are lost."""
WARM_UP_SECONDS = 0.75
"""Time limit for the graphs after the first, before the engine is ready."""
WARM_SECONDS = 0.05
"""A graph that takes longer is run only once during warm-up, because the start waits for it ..."""
FIRST_GRAPH_SECONDS = 0.25
"""... the very first one if it takes longer than this: most of that is reading weights, cold or not."""
OVERDUE_FACTOR = 20.0
OVERDUE_SECONDS = 5.0
"""A step is overdue, and the engine not ready, after max(OVERDUE_SECONDS, OVERDUE_FACTOR x its measured time)."""
FIRST_SECONDS = 30.0
"""Time limit of a graph that never ran, whatever its estimate: it touches memory for the first time."""

RISE, FALL = 0.05, 0.5
"""How far one execution moves the estimate: noise only adds time, so a faster execution is trusted more."""
OUTLIER = 4.0
"""A single step counts for at most this many times the estimate: one page fault or busy core is not a trend."""
RECOVERY = 0.002
"""How far a graph that did not run moves back to its best time: slow on a busy machine, it gets another chance."""
PROPORTION = 0.9
"""The cost of a graph that never ran is assumed to grow with its tokens to this power."""
CLEAR_GAIN = 0.8
"""A larger graph that does no more useful work must cost less than this fraction of the smaller one."""

Tensors = Mapping[str, Any]
"""Tensors by name: torch's or NumPy's, as the model takes them. For a NumPy model an InputBlock is cheapest."""
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Graph:
    """One compiled step: ``batch`` rows of ``length`` tokens."""

    name: str
    batch: int
    length: int


G = TypeVar("G", Graph, BucketSpec)


class StepCosts:
    """Seconds per execution, by graph. Before anything is measured, larger graphs are assumed to cost more."""

    def __init__(self, graphs: Iterable[Graph], given: Mapping[str, float] | None = None):
        """``given``: fixed seconds by graph that override measurements: the same choices in every run.

        Raises ValueError for an unknown graph or a cost that is not positive.
        """
        self._tokens = {graph.name: max(1, graph.batch * graph.length) for graph in graphs}
        self._seconds = {name: 1e-3 + 1e-5 * tokens for name, tokens in self._tokens.items()}
        self._best: dict[str, float] = {}
        self._first: dict[str, float] = {}
        """Graphs that have run once for requests; that time includes touching memory for the first time."""
        self._given = frozenset(given or ())
        for name, seconds in (given or {}).items():
            if name not in self._seconds or not 0 < seconds < inf:
                known = ", ".join(self._seconds)
                raise ValueError(f"costs: {name!r} = {seconds!r}: expected seconds above 0 for one of {known}")
            self._seconds[name] = seconds

    def __getitem__(self, name: str) -> float:
        return self._seconds[name]

    def set(self, name: str, seconds: float) -> None:
        """Set ``seconds`` as the cost, replacing earlier measurements (used by warm-up)."""
        if name in self._given:
            return
        self._seconds[name] = self._best[name] = max(seconds, 1e-9)
        self._first.pop(name, None)
        for other in self._seconds.keys() - self._best.keys() - self._given:
            self._seconds[other] = self._estimate(self._tokens[other])

    def measured(self, name: str) -> bool:
        """Whether the graph's cost is measured; else it is an estimate."""
        return name in self._best or name in self._given

    def settled(self, name: str) -> bool:
        """Whether the graph's cost is measured, and not only while it was cold."""
        return self.measured(name) and name not in self._first

    def smallest_first(self) -> list[str]:
        """Return the graphs' names, ordered by the number of tokens."""
        return sorted(self._tokens, key=self._tokens.__getitem__)

    def observe(self, name: str, seconds: float) -> None:
        """Update the estimate with one execution. Of a graph's first two, the faster one replaces it."""
        if name in self._given:
            return
        if name not in self._best:
            estimate = self._seconds[name] if self._best else seconds
            self.set(name, seconds)
            # If it only seems slow because it was cold, it is tried again later: see RECOVERY.
            self._best[name], self._first[name] = min(estimate, seconds), seconds
            return
        if name in self._first:
            self.set(name, min(self._first[name], seconds))
            return
        known = self._seconds[name]
        weight = FALL if seconds < known else RISE
        self._seconds[name] = max(known + weight * (min(seconds, OUTLIER * known) - known), 1e-9)
        self._best[name] = min(self._best[name], self._seconds[name])
        for other, best in self._best.items():
            if other != name:
                self._seconds[other] += RECOVERY * (best - self._seconds[other])

    def _estimate(self, tokens: int) -> float:
        """Estimate from the largest measured graph that is not larger, else from the smallest."""
        known = sorted((self._tokens[name], self._seconds[name]) for name in self._best if name in self._tokens)
        near, seconds = max((pair for pair in known if pair[0] <= tokens), default=known[0] if known else (1, 1e-3))
        return seconds * max(1.0, tokens / near) ** PROPORTION

    def cheapest(self, graphs: Sequence[G], useful: Callable[[G], float]) -> G:
        """Return the graph with the most ``useful`` work per second; ``graphs`` go from small to large, and
        padding must clearly pay."""
        chosen, most, rate = graphs[0], 0.0, -1.0
        for graph in graphs:
            work = useful(graph)
            speed = work / self._seconds[graph.name]
            if rate < 0 or speed > (rate if work > most else rate / CLEAR_GAIN):
                chosen, most, rate = graph, work, speed
        return chosen

    def as_dict(self) -> dict[str, float]:
        return dict(self._seconds)


@dataclass(slots=True)
class StepInFlight:
    """A step for requests that the ranks already have, or (``pending`` is None) that runs when it is waited for."""

    bucket: str
    inputs: Tensors
    pending: PendingStep | None
    work: Any
    """The caller's data, returned with the finished step."""


class StepRunner:
    """Runs the buckets of ``model`` and records statistics."""

    def __init__(
        self,
        model: RankModel,
        costs: StepCosts,
        padding: Callable[[str], Tensors],
        clock: Callable[[], float] = time.monotonic,
    ):
        """``padding``: inputs that run a graph, by name, without a request."""
        self.model = model
        self.costs = costs
        self._padding = padding
        self._clock = clock
        self.in_flight: deque[StepInFlight] = deque()
        """Steps that have begun and not finished, in order."""
        self.worked = False
        """Whether a step for requests has succeeded since the ranks were started."""
        self._started: float | None = None
        self._bucket = ""
        self._last: float | None = None
        # Statistics of steps for requests, by bucket.
        self.bucket_steps: Counter[str] = Counter()
        self.bucket_seconds: defaultdict[str, float] = defaultdict(float)
        self.useful_tokens: Counter[str] = Counter()
        self.padding_tokens: Counter[str] = Counter()

    # --- steps for requests -----------------------------------------------------------------------------

    def begin(self, bucket: str, inputs: Tensors, work: Any = None) -> None:
        """Give a step to the ranks, after those that they already have, if they accept it at once (an InputBlock).

        ``inputs`` must be within their limits. If accepted, they may be changed; otherwise :meth:`finish` reads them.
        """
        block = isinstance(inputs, InputBlock)
        pending = self.model.begin_bucket(bucket, inputs, checked=True) if block else None
        self.in_flight.append(StepInFlight(bucket, inputs, pending, work))
        if len(self.in_flight) == 1:
            self._bucket, self._started = bucket, self._clock()

    def finish(self, useful: int, padding: int) -> dict[str, Any]:
        """Wait for the oldest step in flight, of ``useful`` and ``padding`` tokens; return its outputs, valid until
        the next one begins."""
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
        self.costs.observe(bucket, seconds)
        self.bucket_steps[bucket] += 1
        self.bucket_seconds[bucket] += seconds
        self.useful_tokens[bucket] += useful
        self.padding_tokens[bucket] += padding
        return outputs

    def forget(self) -> None:
        """Drop the steps in flight, because the ranks are gone."""
        self.in_flight.clear()
        self._started = None

    @contextlib.contextmanager
    def visible(self, bucket: str) -> Iterator[None]:
        """Show the body of the ``with`` block as a step of ``bucket``; on success it counts as the last step."""
        self._bucket, self._started = bucket, self._clock()
        try:
            yield
        finally:
            self._started = None
        self._last = self._clock()

    # --- steps without a request ------------------------------------------------------------------------

    def timed(self, bucket: str, inputs: Tensors) -> tuple[dict[str, Any], float]:
        """Run once without a request; return outputs and seconds (the ranks' own time if they report it)."""
        started = self._clock()
        with self.visible(bucket):
            if isinstance(inputs, InputBlock):
                step = self.model.begin_bucket(bucket, inputs)
                return step.result(), step.seconds
            outputs = self.model.run_bucket(bucket, inputs)
        return outputs, self._clock() - started

    def warm_up(self, on_progress: Progress | None, going: Callable[[], bool]) -> None:
        """Run graphs before requests arrive, while ``going``; ``on_progress(done, total, bucket)`` gets the next graph
        each time, and "" at the end: then ``done`` may be less than ``total``, all graphs."""
        report = on_progress or (lambda done, total, bucket: None)
        names, ran, end = self.costs.smallest_first(), 0, inf
        for name in names:
            if ran and (self.costs.measured(name) or self._clock() + self.costs[name] > end):
                break
            if not going():
                return
            report(ran, len(names), name)
            if self.costs.measured(name):
                self.timed(name, self._padding(name))  # cold, so the time says nothing about later runs
            else:
                self._measure(name)
            ran += 1
            end = min(end, self._clock() + WARM_UP_SECONDS)
        if ran:
            report(ran, len(names), "")

    def when_idle(self, probe: float) -> None:
        """Run a graph that has not run yet, once the engine has been idle for as long as it may take. Otherwise, after
        ``probe`` idle seconds, run the cheapest graph, to check that the ranks still answer."""
        age = inf if self.age is None else self.age
        names = self.costs.smallest_first()
        new = next((name for name in names if not self.costs.settled(name)), None)
        if new is not None and age >= self.costs[new]:
            self._measure(new)
        elif age >= probe:
            name = min(names, key=self.costs.__getitem__)
            self.timed(name, self._padding(name))

    def _measure(self, bucket: str) -> None:
        """Set the cost of ``bucket``: the faster of two executions.

        The first execution touches memory for the first time. A large graph runs only once, because this overhead is
        small in its time, and later steps correct it. The very first graph also warms up the ranks, so if it runs once,
        its next run counts, which is when the engine is idle at the latest: one that seems slow is never chosen.
        """
        cold = self._last is None
        seconds = self.timed(bucket, self._padding(bucket))[1]
        if seconds <= (FIRST_GRAPH_SECONDS if cold else WARM_SECONDS):
            seconds = min(seconds, self.timed(bucket, self._padding(bucket))[1])
        elif cold:
            self.costs.observe(bucket, seconds)
            return
        self.costs.set(bucket, seconds)

    def check_alive(self) -> None:
        """Raise the error that ended the ranks, or RankError for a rank whose process is gone."""
        for rank in self.model.health():
            if not rank.alive:
                # Read after the ranks' health: the first failure is recorded before the other ranks are ended for it.
                end = time.monotonic() + END_SECONDS  # the thread that watches the ranks may be late
                while (first := self.model.failure) is None and time.monotonic() < end:
                    time.sleep(0.01)
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
        """Seconds since the step in flight began; None if there is none."""
        started = self._started
        return None if started is None else self._clock() - started

    @property
    def overdue(self) -> str:
        """Why the step in flight takes too long, compared to its cost; "" if it does not."""
        running, bucket = self.running_for, self._bucket
        least = OVERDUE_SECONDS if not bucket or self.costs.measured(bucket) else FIRST_SECONDS
        limit = max(least, OVERDUE_FACTOR * self.costs.as_dict().get(bucket, 0.0))
        if running is None or running <= limit:
            return ""
        return f"a step of {bucket} has been running for {running:.1f} s (limit {limit:.1f} s)"
