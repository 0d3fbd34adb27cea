"""What lies between callers and the engine's thread: how many requests may wait, and which may begin while weights are
swapped."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from nxd_server.errors import (
    EngineUnavailableError,
    QueueFullError,
    RequestError,
    WeightsBusyError,
)


def check_timeout(timeout: float | None) -> None:
    """Raise RequestError unless ``timeout`` is None or a positive number of seconds."""
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise RequestError("timeout", f"must be a positive number of seconds, got {timeout}")


class QueueLimit:
    """Counts the requests of one engine, and rejects those that would wait behind too many."""

    def __init__(self, lock: threading.Condition, max_queued_requests: int, capacity: int):
        """``lock`` is the engine's; ``capacity``: requests that fit without queueing."""
        self.max_queued_requests = max_queued_requests
        self.capacity = capacity
        self.draining = False
        """Whether new requests are rejected."""
        self.inside = 0
        """Accepted and unfinished requests; only changed with the lock held."""
        self.unreported = 0
        """Requests whose end has not been reported to the caller yet; a drain waits for them."""
        self.submitted = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        """By reason: ``queue_full``, ``unavailable``, ``invalid``."""
        self._lock = lock
        self._request_seconds = 0.0
        """A moving average of the time per request."""

    def check(self, requests: int) -> None:
        """Raise QueueFullError if ``requests`` would wait behind too many others; free capacity counts."""
        limit = self.capacity + self.max_queued_requests
        if self.inside + requests <= limit:
            return
        waiting = max(0, self.inside - self.capacity)
        raise self.full(
            f"{waiting} requests are waiting and at most {self.max_queued_requests} may; try again later", waiting
        )

    def full(self, message: str, waiting: int) -> QueueFullError:
        """Count and return the error of a request with ``waiting`` others ahead of it."""
        self.rejected["queue_full"] += 1
        seconds = self._request_seconds * (waiting + 1) / max(1, self.capacity)
        return QueueFullError(message, min(60.0, max(1.0, seconds)))

    def taken(self, requests: int) -> None:
        """Count accepted requests; call with the lock held."""
        self.inside += requests
        self.unreported += requests
        self.submitted += requests

    def ended(self, outcome: str, seconds: float) -> None:
        """Count one finished request; call it before reporting the end to its caller."""
        self.finished[outcome] += 1
        if outcome in ("stop", "length", "done"):
            known = self._request_seconds
            self._request_seconds = seconds if known == 0.0 else known + 0.1 * (seconds - known)
        with self._lock:
            self.inside -= 1

    def reported(self) -> None:
        """Record that the end of a request has been reported to its caller."""
        with self._lock:
            self.unreported -= 1
            self._lock.notify_all()


class WholeRequest:
    """One client request: perhaps several prompts, choices, or batches of texts.

    Every part is submitted with this object; then it is closed, by ``close()`` or a ``with`` block.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """The version of the weights that answer it, set when its first part begins."""
        self._parts = 1
        """Unfinished parts, plus one while more may come; changed with the gate's lock held."""
        self._gate: WeightGate | None = None

    def close(self) -> None:
        """Declare that no more parts will come. Idempotent and thread-safe."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.end(self)

    def __enter__(self) -> WholeRequest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class Change:
    """A pending change of the weights."""

    action: Callable[[], None]
    quiet: bool
    """Whether it waits until all begun requests have ended, holds back the others, and makes a new version."""
    begun: bool = False
    done: bool = False
    version: int = 0
    """The version of the weights after the change."""
    error: BaseException | None = None


class WeightGate:
    """Swaps weights between requests: they pass the gate when they begin; a change of the weights closes it until the
    change is made.

    All parts of one request are answered by the same weights. While a change is wanted, requests that have begun
    continue to their end and all others wait. Then the engine's thread makes the change, and the waiting requests begin
    on the new weights. None is rejected. (An adapter goes into an unused slot, so it only waits for a step to end.)
    ``version`` counts the changes; anything that keeps a graph's results beyond one request (such as a prefix cache)
    must include it in its keys.
    """

    def __init__(self, lock: threading.Condition):
        """``lock`` is the engine's; its waiters are woken when a change is wanted, begins or is over."""
        self.version = 0
        self._lock = lock
        self._begun: set[WholeRequest] = set()
        """Requests with a version that have unfinished parts or may get more."""
        self._change: Change | None = None
        self.openings = 0
        """How many changes are over, made or not: with each, waiting requests may begin."""
        self._over = ""
        """The engine's final state, once it makes no more changes."""

    # --- requests ---------------------------------------------------------------------------------------

    def take(self, whole: WholeRequest, parts: int) -> None:
        """Count queued parts; call with the lock held."""
        whole._gate = self
        whole._parts += parts

    def may_begin(self, whole: WholeRequest) -> bool:
        """Whether a part of ``whole`` may begin now."""
        return not self.closed or whole in self._begun

    def begin(self, whole: WholeRequest) -> None:
        """Record that a part of ``whole`` begins."""
        with self._lock:
            if whole.version is None:
                whole.version = self.version
                self._begun.add(whole)

    def end(self, whole: WholeRequest) -> None:
        """Record that a part of ``whole`` has ended, begun or not, or that no more will come."""
        with self._lock:
            whole._parts -= 1
            if whole._parts == 0:
                self._begun.discard(whole)
                if self._change is not None:
                    self._lock.notify_all()

    # --- the change -------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether requests are being held back for a change."""
        return self._change is not None and self._change.quiet

    @property
    def changing(self) -> bool:
        """Whether a change is being made; call with the lock held."""
        return self._change is not None and self._change.begun

    @property
    def due(self) -> bool:
        """Whether a change is wanted and nothing is left to wait for. :meth:`take_change` decides."""
        change = self._change
        return change is not None and not change.begun and not (change.quiet and self._begun)

    def change(
        self, action: Callable[[], None], timeout: float, *, withdrawn: Callable[[], None], quiet: bool = True
    ) -> int:
        """Have the engine's thread run ``action``, which changes the weights, between steps; return the new version.

        ``quiet``: between requests, as a new version. One change at a time. A change that has begun belongs to the
        engine: it completes even if this caller is interrupted. ``withdrawn`` is called if it never begins.

        Raises what ``action`` raises; WeightsBusyError if there is another change, or if begun requests did not finish
        within ``timeout`` seconds; EngineUnavailableError, at once, if the engine makes no more changes. The last two
        change nothing, and requests continue.
        """
        change = Change(action, quiet)
        try:
            with self._lock:
                if self._over:
                    raise EngineUnavailableError(f"the weights are unchanged: the engine is {self._over}", self._over)
                if self._change is not None:
                    raise WeightsBusyError
                self._change = change
                self._lock.notify_all()
                self._lock.wait_for(lambda: change.begun or change.done, min(timeout, threading.TIMEOUT_MAX))
                if not (change.begun or change.done):
                    raise WeightsBusyError(self._late(quiet, timeout))
                self._lock.wait_for(lambda: change.done)  # bounded by the model's own limits
        finally:
            with self._lock:
                if self._change is change and not change.begun:
                    self._open()
            if not change.begun:
                withdrawn()  # without the lock, because closing a large file takes a while
        if change.error is not None:
            raise change.error
        return change.version

    def _late(self, quiet: bool, timeout: float) -> str:
        what = f"{len(self._begun)} requests that had begun were" if quiet else "the step that runs was"
        return f"{what} not finished after {timeout:g} s; the weights are unchanged: try again, or allow more time"

    def _open(self) -> None:
        self._change = None
        self.openings += 1
        self._lock.notify_all()

    def take_change(self) -> Change | None:
        """Return the change to make now, if any; :meth:`finish` must follow. Called by the engine's thread."""
        with self._lock:
            if not self.due or self._change is None:
                return None
            self._change.begun = True
            self._lock.notify_all()
            return self._change

    def finish(self, error: BaseException | None = None) -> None:
        """Record that the change was made, or that it failed with ``error`` and the old weights stay."""
        with self._lock:
            change = self._change
            if change is None:
                return
            if error is None and change.quiet:
                self.version += 1
            change.error, change.version, change.done = error, self.version, True
            self._open()

    def abandon(self, state: str) -> None:
        """Reject further changes, because the engine is ``state``; one that has begun still finishes."""
        with self._lock:
            self._over = state
            if self._change is not None and not self._change.begun:
                self.finish(EngineUnavailableError(f"the weights are unchanged: the engine is {state}", state))
