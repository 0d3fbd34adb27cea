"""One HTTP request's choices in the engine: submitted, watched and cancelled together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from starlette.types import Receive

from nxd_server.engine.events import ErrorEvent, Event, FinishEvent, OnEvent, TokenEvent, Usage
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.engine.weight_gate import WholeRequest
from nxd_server.errors import DEADLINE_GRACE, ended_early, not_finished
from nxd_server.http.openai.event_mailbox import Mailbox
from nxd_server.http.request_body import ClientLeft

if TYPE_CHECKING:
    from nxd_server.app.service import Service
    from nxd_server.http.ops.metrics import Metrics
    from nxd_server.text.grammars import CompiledGrammar

_LEFT: Any = object()


class Generation:
    """An async context manager: entering submits every prompt, leaving cancels what has not finished.

    Choices are numbered ``prompt * n + index``, as OpenAI numbers them.
    """

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        receive: Receive,
        timeout: float,
        request_id: str,
        whole: WholeRequest,
        adapter: str | None = None,
        grammar: CompiledGrammar | None = None,
    ):
        """``params``: of each prompt, with the same ``n`` and ``grammar``."""
        self._service = service
        self._metrics = metrics
        self._prompts = prompts
        self._params = params
        self._n = params[0].n
        self._receive = receive
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._request_id = request_id
        self._whole = whole
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
            self._service.check_room(self.choices)  # or the first ones would take it from other requests
            for place, (prompt, params) in enumerate(zip(self._prompts, self._params, strict=True)):
                self._tickets.append(
                    self._service.submit(
                        list(prompt),
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
        while (await self._receive())["type"] != "http.disconnect":
            pass
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
