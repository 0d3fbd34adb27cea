"""One HTTP request's choices in the engine: submitted, watched and cancelled together."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from nxd_server.engine.request import ErrorEvent, Event, FinishEvent, OnEvent, TokenEvent, Usage
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.errors import DEADLINE_GRACE, ended_early, not_finished
from nxd_server.http.request_body import ClientLeft, client_left
from nxd_server.http.request_context import context_of, request_id, seconds_left, whole_of

if TYPE_CHECKING:
    from nxd_server.text.grammars import CompiledGrammar

_LEFT: Any = object()


class Generation:
    """An async context manager: entering submits every prompt, leaving cancels what has not finished.

    Choices are numbered ``prompt * n + index``, as OpenAI numbers them.
    """

    def __init__(
        self,
        request: Request,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        adapter: str | None,
        grammar: CompiledGrammar | None,
    ):
        """``params``: of each prompt, with the same ``n`` and ``grammar``."""
        context = context_of(request)
        self._service, self._metrics = context.service, context.metrics
        self._prompts = prompts
        self._params = params
        self._n = params[0].n
        self._receive = request.receive
        self._timeout = seconds_left(request)
        self._deadline = time.monotonic() + self._timeout
        self._request_id = request_id(request)
        self._whole = whole_of(request)
        self._adapter = adapter
        self._grammar = grammar
        self._mailbox: Mailbox | None = None
        self._tickets: list[Any] = []
        self._watcher: asyncio.Task[None] | None = None
        self._last_token: dict[int, float] = {}
        self.choices = len(prompts) * self._n
        self.unfinished = self.choices
        self.completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        """Of each prompt, in its first choice that has ended."""

    @property
    def usage(self) -> Usage:
        """Token counts so far; a prompt counts once, however many choices it has."""
        prompt_tokens = sum(len(prompt) for prompt in self._prompts)
        return Usage(prompt_tokens, self.completion_tokens, sum(self._cached_tokens.values()))

    @property
    def weight_version(self) -> int | None:
        """The version of the weights that answer; None until the first prompt has begun."""
        return self._whole.version

    async def __aenter__(self) -> Generation:
        self._mailbox = mailbox = Mailbox()
        try:
            engine = self._service.require_engine()
            engine.check_room(self.choices)  # or the first ones would take it from other requests
            for place, (prompt, params) in enumerate(zip(self._prompts, self._params, strict=True)):
                self._tickets.append(
                    engine.submit(
                        prompt,
                        params,
                        _handover(mailbox, place * self._n),
                        timeout=self._timeout,
                        request_id=self._request_id,
                        adapter=self._adapter,
                        whole=self._whole,
                        grammar=self._grammar,
                    )
                )
        except BaseException:  # all or nothing
            self._cancel()
            raise
        finally:
            self._whole.close()
        self._watcher = asyncio.create_task(self._watch(mailbox))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._box.close()
        if self.unfinished:
            self._cancel()

    async def next(self, wait: float | None = None) -> tuple[int, TokenEvent | FinishEvent] | None:
        """Return the next event with its choice's index; ``None`` after ``wait`` seconds without one.

        Raises:
            ClientLeft: the connection closed.
            NxdError: a choice failed, or the deadline passed; then the whole request has failed.
        """
        left = self._deadline + DEADLINE_GRACE - time.monotonic()
        patience = left if wait is None else min(wait, left)
        item = await self._box.get(patience)
        if item is not None:
            return self._take(item)
        if time.monotonic() - self._deadline >= DEADLINE_GRACE:
            raise not_finished(self._service.settings.request_timeout)
        return None

    def ready(self) -> tuple[int, TokenEvent | FinishEvent] | None:
        """Return an event that has already arrived, if any. Raises as :meth:`next`."""
        item = self._box.get_nowait()
        return None if item is None else self._take(item)

    async def whole(self, token: Callable[[int, TokenEvent], None]) -> list[tuple[str, str]]:
        """Return text and finish reason of every choice once all have ended. Raises as :meth:`next`.

        ``token(choice, event)`` is called for every token of an answer, except the one that stops it.
        """
        texts, reasons = [""] * self.choices, [""] * self.choices
        async with self:
            while self.unfinished:
                item = await self.next()
                if item is None:
                    continue
                choice, event = item
                texts[choice] += event.text
                if isinstance(event, FinishEvent):
                    reasons[choice] = event.reason
                elif not event.is_stop:
                    token(choice, event)
        return list(zip(texts, reasons, strict=True))

    @property
    def _box(self) -> Mailbox:
        if self._mailbox is None:
            raise RuntimeError("a Generation is used as `async with generation:`")
        return self._mailbox

    def _take(self, item: tuple[int, Event]) -> tuple[int, TokenEvent | FinishEvent]:
        if item is _LEFT:
            raise self._gone()
        base, event = item
        choice = base + event.index
        if isinstance(event, TokenEvent):
            now = time.monotonic()
            if choice in self._last_token:
                self._metrics.inter_token.observe(now - self._last_token[choice])
            self._last_token[choice] = now
            return choice, event
        self.unfinished -= 1
        self._metrics.finished(event)
        if isinstance(event, ErrorEvent):
            raise event.error
        if event.reason == "cancelled":  # not by this class: the server is shutting down
            raise ended_early()
        self.completion_tokens += event.usage.completion_tokens
        self._cached_tokens.setdefault(base // self._n, event.usage.cached_tokens or 0)
        return choice, event

    def check_client(self) -> None:
        """Raise ClientLeft if the connection has closed, even if the whole answer is here already."""
        if self._watcher is not None and self._watcher.done():
            raise self._gone()

    async def _watch(self, mailbox: Mailbox) -> None:
        await client_left(self._receive)
        mailbox.put(_LEFT)

    def _gone(self) -> ClientLeft:
        self._metrics.disconnected()
        return ClientLeft()

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()


def _handover(mailbox: Mailbox, base: int) -> OnEvent:
    """Return an ``on_event`` for the engine's thread."""
    return lambda event: mailbox.put((base, event))


# --- events from the engine's thread, with one wake-up of the event loop per step ---


class Doorbell:
    """Makes an event loop check mailboxes: a step fills one per row, but mostly wakes the loop only once."""

    _of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Doorbell] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._rung: deque[Mailbox] = deque()
        self._called = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> Doorbell:
        return cls._of_loops.setdefault(loop, cls(loop))

    def ring(self, mailbox: Mailbox) -> None:
        """Thread-safe; never blocks, and does nothing once the loop is closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():  # nobody is left to notify
            self._rung.clear()
            return
        self._rung.append(mailbox)
        if self._called:
            return
        self._called = True
        try:
            loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it was closed meanwhile
            self._rung.clear()
        except BaseException:  # the next call tries again
            self._called = False
            raise

    def _answer(self) -> None:
        self._called = False  # first, so that items put from here on ring again
        for _ in range(len(self._rung)):
            self._rung.popleft().wake()


class Mailbox:
    """From the engine's thread to one coroutine, one wake-up for all events that have arrived."""

    def __init__(self) -> None:
        self._bell = Doorbell.of(asyncio.get_running_loop())
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[bool] | None = None
        self._due = 0.0
        """End of the current wait, on the loop's clock."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # stored, because a uvloop timer that is nearly due does not report its time

    def put(self, item: Any) -> None:
        """Thread-safe; never blocks, and does nothing once the loop is closed."""
        self._items.append(item)
        self._bell.ring(self)

    def get_nowait(self) -> Any | None:
        return self._items.popleft() if self._items else None

    async def get(self, wait: float) -> Any | None:
        """Return the next item, or ``None`` after ``wait`` seconds. (``asyncio.wait_for`` needs a task per token.)"""
        if not self._items and wait > 0:
            loop = asyncio.get_running_loop()
            self._due = loop.time() + wait
            if self._timer is None or self._timer_due > self._due:  # an earlier timer will find that time is left
                self.close()
                self._look_again(loop)
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.get_nowait()

    def close(self) -> None:
        """Stop waiting."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """Called in the loop: an item was put."""
        if self._items:  # empty if the item was already taken together with an earlier one
            self._end_wait()

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._look_again(loop)
        else:
            self._end_wait()

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer_due = self._due
        self._timer = loop.call_at(self._due, self._look)

    def _end_wait(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)
