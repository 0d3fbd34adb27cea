"""What lies between callers and the engine's thread: how much may wait, and what may begin while weights are
swapped."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nxd_server.accounts import ANONYMOUS, Account
from nxd_server.engine.fair_queue import Waiting
from nxd_server.errors import EngineUnavailableError, QueueFullError, RequestError, WeightsBusyError

KNOWN = 2
"""How often the whole capacity must have been taken anew by requests that waited before a wait is foretold."""


def check_timeout(timeout: float | None) -> None:
    """Raise RequestError unless ``timeout`` is None or a positive number of seconds."""
    if timeout is not None and not (timeout > 0 and math.isfinite(timeout)):
        raise RequestError("timeout", f"must be a positive number of seconds, got {timeout}")


class QueueLimit:
    """Counts the requests of one engine, and rejects those that would wait behind too much, or for too long.

    Where several accounts wait, none can fill the queue for the others: what is within an account's equal share of a
    limit is taken even if the others have more than theirs.
    """

    def __init__(
        self,
        lock: threading.Condition,
        capacity: int,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        max_wait: float | None = None,
    ):
        """``lock`` is the engine's; ``capacity``: requests that fit without queueing. Of the requests that wait,
        ``max_requests``: how many, ``max_tokens``: with how many tokens, ``max_wait``: for how many seconds."""
        self.capacity = capacity
        self.max_requests, self.max_tokens, self.max_wait = max_requests, max_tokens, max_wait
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
        self._waiting: Counter[str] = Counter()
        """Requests that have not begun, by account, without zeros ..."""
        self._tokens: Counter[str] = Counter()
        """... the tokens of their prompts ..."""
        self._ahead: defaultdict[str, float] = defaultdict(float)
        """... and what they are expected to take with their answers; only changed with the lock held."""
        self._answer = math.inf
        """A moving average of the tokens of an answer."""
        self._full_since: float | None = None
        """Since when all capacity is in use and others wait; None: it is not so."""
        self._begun = self._work = self._seconds = 0.0
        """Of the last requests that had to wait and began: their number, their work in tokens, and how long it took."""

    @property
    def most(self) -> float:
        """How many requests may be inside."""
        return math.inf if self.max_requests is None else self.capacity + self.max_requests

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the requests that have not begun."""
        return self._tokens.total()

    def check(self, whole: WholeRequest, requests: int, tokens: int, timeout: float | None = None) -> None:
        """Raise QueueFullError if ``requests`` would wait behind too much, or longer than they may; free capacity
        counts. RateLimitError if the account has no tokens left. Call with the lock held.

        ``tokens``: of all of them. ``timeout``: seconds that they may take in all; they must begin before.
        """
        if not whole.charged:
            whole.account.check_tokens()
        ahead = self.inside - self.capacity
        if ahead + requests <= 0:
            return
        owner, held = whole.owner, self._tokens.total()
        owners = len({owner, *self._waiting})
        wait = self._wait(owner, owners)
        for limit, what, waiting, more, own in (
            (self.max_requests, "requests", ahead, requests, self._waiting[owner]),
            (self.max_tokens, "prompt tokens", held, tokens if held else 0, self._tokens[owner]),
        ):
            if limit is not None and waiting + more > limit and (owners == 1 or own + more > limit / owners):
                raise self._full(f"{max(0, waiting)} {what} are waiting and at most {limit} may", wait)
        longest = min(timeout or math.inf, self.max_wait or math.inf)
        if wait > longest:
            why = f"{held} prompt tokens are waiting, and a request would begin in {wait:.0f} s"
            raise self._full(f"{why}; it may wait for {longest:.3g} s", wait - longest)

    def _full(self, message: str, seconds: float) -> QueueFullError:
        self.rejected["queue_full"] += 1
        return QueueFullError(f"{message}; try again later", min(60.0, max(1.0, seconds)))

    def _wait(self, owner: str, owners: int) -> float:
        """Return in how many seconds one more of ``owner`` would begin; 0 as long as nothing is known."""
        if self._begun < KNOWN * self.capacity or not self._work:
            return 0.0
        own = self._ahead.get(owner, 0.0)
        return min(sum(self._ahead.values()), owners * own) * self._seconds / self._work

    def work(self, prompt: int, most: int) -> float:
        """Return how many tokens a prompt and its answer of at most ``most`` may come to, by the last answers."""
        return prompt + min(most, self._answer)

    def taken(self, whole: WholeRequest, requests: int, tokens: int, work: float) -> None:
        """Count accepted requests; ``tokens`` and ``work``: of all of them. Call with the lock held."""
        self.inside += requests
        self.unreported += requests
        self.submitted += requests
        self._waiting[whole.owner] += requests
        self._tokens[whole.owner] += tokens
        self._ahead[whole.owner] += work
        whole.asked += tokens // requests  # a prompt counts once, however many choices it has
        whole.account.spend(prompt=max(0, whole.asked - whole.charged))
        whole.charged = max(whole.charged, whole.asked)

    def begun(self, items: Collection[Waiting], full: bool) -> None:
        """Record that these wait no more because they begin; ``full``: all capacity is in use now and others wait."""
        with self._lock:
            now, since = time.monotonic(), self._full_since
            for item in items:
                self._leave(item)
            if since is not None:
                kept = (1 - 1 / (2 * KNOWN * self.capacity)) ** len(items)
                self._begun = kept * self._begun + len(items)
                self._work = kept * self._work + sum(item.work for item in items)
                self._seconds = kept * self._seconds + now - since
            self._full_since = now if full else None

    def withdrawn(self, item: Waiting) -> None:
        """Record that one waits no more, because it has ended."""
        with self._lock:
            self._leave(item)

    def _leave(self, item: Waiting) -> None:
        owner = item.whole.owner
        self._waiting[owner] -= 1
        self._tokens[owner] -= item.cost
        self._ahead[owner] -= item.work
        if not self._waiting[owner]:
            del self._waiting[owner], self._tokens[owner], self._ahead[owner]
        if not self._waiting:
            self._full_since = None

    def ended(self, outcome: str, whole: WholeRequest, answer: int = 0) -> None:
        """Count one finished request; ``answer``: its tokens. Call it before reporting the end to its caller."""
        self.finished[outcome] += 1
        whole.account.spend(generated=answer)
        if outcome in ("stop", "length"):
            self._answer = answer if math.isinf(self._answer) else self._answer + 0.1 * (answer - self._answer)
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

    def __init__(self, account: Account = ANONYMOUS) -> None:
        self.account = account
        self.priority = 0
        """Among the account's own requests the lowest begins first."""
        self.asked = self.charged = 0
        """Tokens of its queued prompts; those that its account was charged for, by an engine that was lost too."""
        self.version: int | None = None
        """The version of the weights that answer it, set when its first part begins."""
        self._parts = 1
        """Unfinished parts, plus one while more may come; changed with the gate's lock held."""
        self._gate: WeightGate | None = None

    @property
    def owner(self) -> str:
        """The account's name."""
        return self.account.name

    def again(self) -> WholeRequest:
        """Return a new one for the same client request, none of whose parts counts any more."""
        fresh = copy.copy(self)
        fresh.version, fresh._parts, fresh._gate, fresh.asked = None, 1, None, 0
        return fresh

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
    wanted: int | None = None
    """The version to make; by default the next one."""
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
        self,
        action: Callable[[], None],
        timeout: float,
        *,
        withdrawn: Callable[[], None],
        quiet: bool = True,
        version: int | None = None,
    ) -> int:
        """Have the engine's thread run ``action``, which changes the weights, between steps; return the new version.

        ``quiet``: between requests, as ``version``, by default the next one. One change at a time. A change that has
        begun belongs to the engine: it completes even if this caller is interrupted. ``withdrawn`` is called if it
        never begins.

        Raises what ``action`` raises; WeightsBusyError if there is another change, or if begun requests did not finish
        within ``timeout`` seconds; EngineUnavailableError, at once, if the engine makes no more changes. The last two
        change nothing, and requests continue.
        """
        change = Change(action, quiet, version)
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
                self.version = self.version + 1 if change.wanted is None else change.wanted
            change.error, change.version, change.done = error, self.version, True
            self._open()

    def abandon(self, state: str) -> None:
        """Reject further changes, because the engine is ``state``; one that has begun still finishes."""
        with self._lock:
            self._over = state
            if self._change is not None and not self._change.begun:
                self.finish(EngineUnavailableError(f"the weights are unchanged: the engine is {state}", state))
