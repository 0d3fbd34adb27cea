"""New weights between requests: which of those that wait may begin, and when nothing of the old ones runs any more.

All answers of one request come from the same weights. While a change is wanted, what has begun goes on to its end and
everything else waits; when nothing is left, the engine's thread makes the change, and those that waited begin on the
new weights. Nobody is refused. (An adapter goes into a slot that nobody uses: it only waits for a step to end.)
``version`` counts the changes; whatever keeps a graph's results beyond one request (a cache of prefixes, say) has it
in its keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from nxd_server.errors import EngineUnavailableError, WeightsBusyError, weights_busy


class WholeRequest:
    """What one client asked for: perhaps several prompts, choices, or lists of texts in waves.

    Every part of it is submitted with this object, then it is closed, by ``close()`` or a ``with`` block.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """The version of the weights that answer it, from the moment its first part begins."""
        self._parts = 1
        """Unfinished parts, and one more while further ones may come; changed under the gate's lock."""
        self._gate: WeightGate | None = None

    def close(self) -> None:
        """No further parts will come. Harmless the second time; from any thread."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.end(self)

    def __enter__(self) -> WholeRequest:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass
class Change:
    """A change of the weights on its way."""

    action: Callable[[], None]
    quiet: bool
    """Whether it waits until nothing that has begun is left, holds back everything else, and makes a new version."""
    begun: bool = False
    done: bool = False
    version: int = 0
    """The weights' version when it was done."""
    error: BaseException | None = None


class WeightGate:
    """Requests pass it when they begin; a change of the weights closes it until it is made."""

    def __init__(self, lock: threading.Condition):
        """``lock`` is the engine's; whoever waits on it is woken when a change is wanted, begins or is over."""
        self.version = 0
        self._lock = lock
        self._begun: set[WholeRequest] = set()
        """Requests with a version, that have unfinished parts or may get further ones."""
        self._change: Change | None = None
        self._over = ""
        """What the engine is, once it makes no change any more."""

    # --- requests ---------------------------------------------------------------------------------------

    def take(self, whole: WholeRequest, parts: int) -> None:
        """Count parts that were queued; called under the lock."""
        whole._gate = self
        whole._parts += parts

    def may_begin(self, whole: WholeRequest) -> bool:
        """Whether a part of ``whole`` may begin now."""
        return not self.wanted or whole in self._begun

    def begin(self, whole: WholeRequest) -> None:
        """A part of ``whole`` begins."""
        with self._lock:
            if whole.version is None:
                whole.version = self.version
                self._begun.add(whole)

    def end(self, whole: WholeRequest) -> None:
        """A part of ``whole`` has ended, begun or not; or no more will come."""
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
        """Whether a change is being made; called under the lock."""
        return self._change is not None and self._change.begun

    @property
    def due(self) -> bool:
        """Whether a change is wanted and nothing is left that it waits for. :meth:`take_change` decides."""
        change = self._change
        return change is not None and not change.begun and not (change.quiet and self._begun)

    def change(
        self, action: Callable[[], None], timeout: float, *, withdrawn: Callable[[], None], quiet: bool = True
    ) -> int:
        """Have the engine's thread run ``action``, which changes the weights, between steps; the version afterwards.

        ``quiet``: between requests, and a new version. One change at a time. What has begun is the engine's: it makes
        it even when this caller is interrupted meanwhile. ``withdrawn`` is called when it never begins.

        Raises what ``action`` raises; WeightsBusyError when there is another change, or when what has begun was not
        finished after ``timeout`` seconds; EngineUnavailableError, at once, when the engine makes none any more.
        Nothing has changed then, and everything goes on.
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
                    self._change = None
                    self._lock.notify_all()
            if not change.begun:
                withdrawn()  # without the lock: the end of a large file takes its time
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

    def take_change(self) -> Change | None:
        """What to make now, if anything; :meth:`finish` follows. The engine's thread calls it."""
        with self._lock:
            if not self.due or self._change is None:
                return None
            self._change.begun = True
            self._lock.notify_all()
            return self._change

    def finish(self, error: BaseException | None = None) -> None:
        """The change was made, or failed with ``error`` and the old weights stay."""
        with self._lock:
            change, self._change = self._change, None
            if change is None:
                return
            if error is None and change.quiet:
                self.version += 1
            change.error, change.version, change.done = error, self.version, True
            self._lock.notify_all()

    def abandon(self, state: str) -> None:
        """The engine is ``state`` and makes no change any more; one that has begun is finished all the same."""
        with self._lock:
            self._over = state
            if self._change is not None and not self._change.begun:
                self.finish(EngineUnavailableError(f"the weights are unchanged: the engine is {state}", state))
