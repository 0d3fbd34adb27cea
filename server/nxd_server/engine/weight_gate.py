"""Swap weights between requests: which waiting requests may begin, and when nothing uses the old weights any more.

All parts of one request are answered by the same weights. While a change is wanted, requests that have begun continue
to their end and all others wait. Then the engine's thread makes the change, and the waiting requests begin on the new
weights. None is rejected. (An adapter goes into an unused slot, so it only waits for a step to end.) ``version``
counts the changes; anything that keeps a graph's results beyond one request (such as a prefix cache) must include it
in its keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from nxd_server.errors import EngineUnavailableError, WeightsBusyError, weights_busy


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
    """Requests pass the gate when they begin; a change of the weights closes it until the change is made."""

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
        return not self.wanted or whole in self._begun

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
    def wanted(self) -> bool:
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
                self._want(change)
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

    def _want(self, change: Change) -> None:
        if self._over:
            raise EngineUnavailableError(f"the weights are unchanged: the engine is {self._over}", self._over)
        if self._change is not None:
            raise weights_busy()
        self._change = change
        self._lock.notify_all()

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
