"""One HTTP request's choices in the engine, submitted, watched and cancelled together; and its answer.

Server-sent events are written by hand: OpenAI's format is only ``data: ...`` and a blank line. A stream ends in one of
two ways. Complete: every choice's last chunk with its finish reason, the usage if requested, ``data: [DONE]``. Failed:
one ``data: {"error": ...}`` and the end, with neither a finish reason nor ``[DONE]``, so that no client can mistake
half an answer for a complete one.
"""

from __future__ import annotations

import asyncio
import functools
import json
import secrets
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from nxd_infer.errors import NxdError
from nxd_server.engine.request import ErrorEvent, Event, FinishEvent, OnEvent, PromptEvent, TokenEvent, Usage
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.errors import (
    DEADLINE_GRACE,
    EngineFailedError,
    EngineUnavailableError,
    RequestError,
    ended_early,
    not_finished,
)
from nxd_server.http.error_responses import ApiError, bad_request, clip, encode
from nxd_server.http.openai.logprobs import prompt_logprobs
from nxd_server.http.openai.schemas import SamplingBody
from nxd_server.http.request_body import ClientLeft, client_left
from nxd_server.http.request_context import context_of, refusal_of, seconds_left, whole_of
from nxd_server.http.scope_keys import ENDS, REQUEST_ID, WHOLE
from nxd_server.threads import Mailbox

if TYPE_CHECKING:
    from nxd_server.app.replica import Replica
    from nxd_server.engine import Engine
    from nxd_server.text.grammars import CompiledGrammar
    from nxd_server.text.tokenizer import Tokenizer

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx buffers the chunks
]
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
PADDED_TO = 64
"""Padded chunks are a multiple of this many bytes long, so that their sizes reveal little about the tokens."""

Given = PromptEvent | TokenEvent | FinishEvent
"""An event of a choice that has not failed."""
MOST_SCORES = 2**18  # log-probabilities of prompts in an answer; JSON of more would stop everything else too long
LOOK_SECONDS = 1.0
"""How often a request without a token looks whether its copy is stuck."""

_LEFT: Any = object()


def check_choices(prompts: int, n: int, limit: int, room: float, name: str = "n") -> None:
    """Raise ApiError 400 for more choices than ``limit``, or than an idle server's ``room``: no retry helps. ``name``:
    what the request calls ``n``."""
    if n >= 1 and prompts * n > min(limit, room):
        why = "max_choices" if limit <= room else "its slots and max_queued_requests"
        raise bad_request(
            f"{prompts} prompts with {name} = {clip(str(n))} are too many choices; one request may ask for "
            f"{min(limit, room)} ({why})",
            param=name if prompts == 1 else "prompt",
        )


def with_limit(params: SamplingParams, limit: int) -> SamplingParams:
    """Return ``params``, whose request named no ``max_tokens``, with this one. Raises RequestError for more
    ``min_tokens``."""
    if params.min_tokens > limit:
        raise RequestError("min_tokens", f"{params.min_tokens} is more than the {limit} tokens that are generated here")
    return params.replace(max_tokens=limit)


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
        scored: int = 1,
    ):
        """``params``: of each prompt, with the same ``n`` and ``grammar``; ``scored``: how often an answer has those
        log-probabilities of a prompt. Raises RequestError for too many of these."""
        context = context_of(request)
        self._request = request
        self._service, self._metrics = context.service, context.metrics
        self._of_model = self._metrics.models[self._service]
        self._prompts = prompts
        self._params = params
        self._n = params[0].n
        self._deadline = time.monotonic() + seconds_left(request)
        self._whole = whole_of(request)
        self._adapter = adapter
        self._how: dict[str, Any] = {"request_id": request.scope[REQUEST_ID], "adapter": adapter, "grammar": grammar}
        self._bell, self.encoders = context.bell, context.encoders
        self._mailbox = Mailbox(context.bell)
        self._tickets: list[Any] = []
        self._replica: Replica | None = None
        self._begun = self._moved = False
        self._watcher: asyncio.Task[None] | None = None
        self._last_token: dict[int, float] = {}
        self.choices = len(prompts) * self._n
        self.unfinished = self.choices
        self.completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}
        """Of each prompt, in its first choice that has ended."""
        top = params[0].prompt_logprobs
        if top is not None and (scores := (top + 1) * scored * sum(map(len, prompts))) > MOST_SCORES:
            raise RequestError("prompt_logprobs", f"{scores} numbers in an answer, but at most {MOST_SCORES} may be")

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
        engine, params = self._service.require_engine(), self._params[0]
        if params.allowed_token_ids or params.bad_words:  # once for all prompts
            self._how["rules"] = await self.encoders.run(functools.partial(engine.rules_of, params))
        self._submit()
        self._watcher = asyncio.create_task(self._watch())
        return self

    def _submit(self, avoid: Sequence[Replica] = ()) -> None:
        """Submit everything to one copy, which none of ``avoid`` is."""
        first = self._prompts[0], self._adapter, self._params[0].cache_salt
        replica = self._replica = self._service.choose(*first, avoid=avoid)
        try:
            self._submit_to(cast("Engine", replica.engine))
        except EngineUnavailableError:  # it was lost just now
            if len(avoid) >= len(self._service.replicas) - 1:
                raise
            self._start_over()
            self._submit([*avoid, replica])

    def _submit_to(self, engine: Engine) -> None:
        left = max(0.001, self._deadline - time.monotonic())
        try:
            # All at once, or the first ones would take the room of other requests.
            tokens = self._n * sum(map(len, self._prompts))
            engine.check_room(self.choices, tokens, whole=self._whole, timeout=left)
            for place, (prompt, params) in enumerate(zip(self._prompts, self._params, strict=True)):
                handover = _handover(self._mailbox, place * self._n)
                ticket = engine.submit(prompt, params, handover, timeout=left, whole=self._whole, **self._how)
                self._tickets.append(ticket)
        except BaseException:  # all or nothing
            self._cancel()
            raise
        finally:
            self._whole.close()

    def _start_over(self) -> None:
        """Forget what was submitted: another copy's weights may be of another version."""
        self._mailbox, self._tickets = Mailbox(self._bell), []
        self._whole = self._request.scope[WHOLE] = self._whole.again()
        if self._watcher is not None and self._watcher.done():
            self._mailbox.put(_LEFT)

    def _moves(self, ran: bool) -> bool:
        """Whether the request begins again in another copy, because its own is lost or stuck and it has no token yet.
        Once, if it ``ran``: it may be what its copy died of."""
        before, lost = (self._mailbox, self._tickets, self._whole), self._replica
        if self._begun or (ran and self._moved) or lost is None:
            return False
        self._start_over()
        try:
            self._submit([lost])
        except NxdError:  # it stays where it is, also if its adapter is gone elsewhere
            self._mailbox, self._tickets, self._whole = before
            self._replica = lost
            self._request.scope[WHOLE] = self._whole
            return False
        self._moved = self._moved or ran
        for ticket in before[1]:
            ticket.cancel()
        return True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._mailbox.close()
        if self.unfinished:
            self._cancel()

    async def next(self, wait: float | None = None) -> tuple[int, Given] | None:
        """Return the next event with its choice's index; ``None`` after ``wait`` seconds without one.

        Raises:
            ClientLeft: the connection closed.
            NxdError: a choice failed, or the deadline passed; then the whole request has failed.
        """
        left = self._deadline + DEADLINE_GRACE - time.monotonic()
        patience = left if wait is None else min(wait, left)
        end = time.monotonic() + patience
        while True:
            left = max(0.0, end - time.monotonic())
            looks = not self._begun and not self._moved and len(self._service.replicas) > 1
            if (item := await self._mailbox.get(min(left, LOOK_SECONDS) if looks else left)) is not None:
                if (taken := self._take(item)) is not None:
                    return taken
            elif time.monotonic() >= end:
                break
            elif looks and self._replica is not None and self._replica.stuck:
                self._moves(ran=True)
        if time.monotonic() - self._deadline >= DEADLINE_GRACE:
            raise not_finished(self._service.settings.request_timeout)
        return None

    def ready(self) -> tuple[int, Given] | None:
        """Return an event that has already arrived, if any. Raises as :meth:`next`."""
        item = self._mailbox.get_nowait()
        return None if item is None else self._take(item)

    def _take(self, item: tuple[int, Event]) -> tuple[int, Given] | None:
        """Return the event; None if the request begins again elsewhere."""
        if item is _LEFT:
            raise self._gone()
        base, event = item
        choice = base + event.index
        if (
            isinstance(event, ErrorEvent)
            and isinstance(event.error, EngineFailedError)
            and self._moves(ran=event.timings.admitted is not None)
        ):
            return None
        self._begun = True
        if isinstance(event, TokenEvent):
            now = time.monotonic()
            if choice in self._last_token:
                self._of_model.inter_token.observe(now - self._last_token[choice])
            self._last_token[choice] = now
        if isinstance(event, PromptEvent | TokenEvent):
            return choice, event
        self.unfinished -= 1
        self._of_model.finished(event)
        self._request.scope.setdefault(ENDS, {})[choice] = event
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

    async def _watch(self) -> None:
        await client_left(self._request.receive)
        self._mailbox.put(_LEFT)

    def _gone(self) -> ClientLeft:
        self._metrics.disconnected()
        return ClientLeft()

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()


def _handover(mailbox: Mailbox, base: int) -> OnEvent:
    """Return an ``on_event`` for the engine's thread."""
    return lambda event: mailbox.put((base, event))


# --- the answer ---


def usage_object(usage: Usage, reasoning: int | None = None) -> dict[str, Any]:
    """Return the field ``usage``; ``reasoning``: the tokens of the answer that are, None for a model without."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


class Answer:
    """One request's answer in the form of its route, whole or as a stream of events."""

    KEEP_ALIVE: ClassVar[bytes] = KEEP_ALIVE

    async def whole(self, generation: Generation) -> Response:
        """Return the response once the generation has ended. Raises as :meth:`Generation.next`."""
        raise NotImplementedError

    def begin(self, weight_version: int | None) -> bytes:
        """Return what precedes the first event; the version of the weights is known by now."""
        return b""

    def event(self, choice: int, event: Given) -> bytes:
        """Return what one event adds to the stream; empty if there is nothing to show."""
        raise NotImplementedError

    def end(self, usage: Usage) -> bytes:
        """Return the end of a complete stream."""
        return b""

    def failure(self, refusal: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        raise NotImplementedError


class Choices(Answer):
    """OpenAI's completions, of text or of chat; a route says what a choice (``choice``) or its chunk (``opening``,
    ``event``) holds.

    Without ``continuous_usage_stats`` the counts are null until the last chunk, without ``include_usage`` absent.
    Constant parts are rendered once.
    """

    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]
    """The field ``object`` of the whole answer, and that of a chunk."""
    _shows_end = False
    """Whether the token that stops an answer is shown like the others."""
    _tokenizer: Tokenizer

    def __init__(
        self, id_prefix: str, model: str, body: SamplingBody, prompts: Sequence[Sequence[int]], n: int | None = None
    ):
        """Choice ``c`` answers prompt ``c // n``; of more than ``body.n`` of a prompt, the likeliest are shown."""
        self._fields: dict[str, Any] = {
            "id": f"{id_prefix}-{uuid.uuid4().hex}",
            "object": self.CHUNK,
            "created": int(time.time()),
            "model": model,
        }
        self._head = b""
        self.prompts, self._n, self._shown, self._asked = prompts, n or body.n, body.n, body.prompt_logprobs
        self._scores: dict[int, list[dict | None]] = {}
        """Of each prompt, as its choices show them, if they are asked for."""
        self.returns_ids = body.return_token_ids
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._counts = self._usage and bool(options and options.continuous_usage_stats)
        self._pads = bool(options and options.include_obfuscation)
        self._tokens: dict[int, int] = {}

    async def whole(self, generation: Generation) -> Response:
        texts, reasons = [""] * generation.choices, [""] * generation.choices
        ids: list[list[int]] = [[] for _ in texts]
        sums = [0.0] * generation.choices
        async with generation:
            while generation.unfinished:
                if (item := await generation.next()) is None:
                    continue
                choice, event = item
                if isinstance(event, PromptEvent):
                    await generation.encoders.run(functools.partial(self.prompt, choice, event))
                    continue
                texts[choice] += event.text
                if isinstance(event, FinishEvent):
                    reasons[choice] = event.reason
                    continue
                ids[choice].append(event.token)
                sums[choice] += event.logprob
                if self._shows_end or not event.is_stop:
                    self.token(choice, event)
        choices: list[dict[str, Any]] = []
        for first in range(0, generation.choices, self._n):
            own = list(range(first, first + self._n))
            if self._shown < self._n:  # the likeliest per token, as OpenAI's best_of
                own = sorted(own, key=lambda choice: -sums[choice] / max(1, len(ids[choice])))[: self._shown]
            for choice in own:
                one = {"index": len(choices), **self.choice(choice, texts[choice], reasons[choice])}
                choices.append({**one, "token_ids": ids[choice]} if self.returns_ids else one)
        answer = {
            **self._fields,
            "object": self.WHOLE,
            **self.about_prompt(),
            "choices": choices,
            "usage": usage_object(generation.usage, self.reasoning_tokens),
            "weight_version": generation.weight_version,
        }
        return JSONResponse(answer)

    def prompt(self, choice: int, event: PromptEvent) -> None:
        """Take the log-probabilities of a choice's prompt; may take seconds."""
        place = choice // self._n
        if self._asked is not None and place not in self._scores:
            self._scores[place] = prompt_logprobs(self._tokenizer, self.prompts[place], event.scores, self._asked)

    def about_prompt(self) -> dict[str, Any]:
        """Return the fields of a whole answer that are about its prompt."""
        return {}

    def token(self, choice: int, event: TokenEvent) -> None:
        """Take a token that a whole answer shows."""
        raise NotImplementedError

    def choice(self, choice: int, text: str, reason: str) -> dict[str, Any]:
        """Return the fields of a whole choice: its text, and the engine's finish reason."""
        raise NotImplementedError

    def begin(self, weight_version: int | None) -> bytes:
        self._head = b"data: " + json.dumps({**self._fields, "weight_version": weight_version})[:-1].encode()
        return self.opening()

    def opening(self) -> bytes:
        """Return the chunks before the first event."""
        raise NotImplementedError

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens of all choices so far are reasoning; None if the model does not reason."""
        return None

    def end(self, usage: Usage) -> bytes:
        if not self._usage:
            return DONE
        counts = json.dumps(usage_object(usage, self.reasoning_tokens))
        return self._head + b',"choices":[],"usage":' + counts.encode() + b"}\n\n" + DONE

    def failure(self, refusal: ApiError) -> bytes:
        return b"data: " + encode(refusal.body()) + b"\n\n"

    def count(self, choice: int) -> None:
        """Count one more token of ``choice``."""
        if self._counts:
            self._tokens[choice] = self._tokens.get(choice, 0) + 1

    def chunk(
        self, choice: int, content: str, *, logprobs: Any = None, reason: str | None = None, event: Given | None = None
    ) -> bytes:
        """Return the chunk of one choice; ``content``: its route's own fields, as JSON; ``event``: what it shows."""
        end = f'"{reason}"' if reason else "null"
        if self.returns_ids and isinstance(event, TokenEvent):
            content += f',"token_ids":[{event.token}]'
        part = f'{{"index":{choice},{content},"logprobs":{json.dumps(logprobs)},"finish_reason":{end}}}]'
        chunk = self._head + b',"choices":[' + part.encode()
        if self._counts:
            usage = Usage(len(self.prompts[choice // self._n]), self._tokens.get(choice, 0))
            chunk += b',"usage":' + json.dumps(usage_object(usage)).encode()
        elif self._usage:
            chunk += b',"usage":null'
        if self._pads:
            chunk += b',"obfuscation":"'
            short = -(len(chunk) + len(b'"}\n\n')) % PADDED_TO
            chunk += secrets.token_hex(PADDED_TO)[:short].encode() + b'"'
        return chunk + b"}\n\n"


async def respond(request: Request, stream: bool, generation: Generation, answer: Answer) -> Response:
    """Return the response to a request: its whole answer, or a stream that the server then runs."""
    if stream:
        return EventStream(generation, answer, context_of(request).settings.keep_alive_interval)
    return await answer.whole(generation)


class EventStream(Response):
    """An ASGI response that runs a generation and streams it.

    Nothing is sent before the first event or ``keep_alive`` seconds, so that an error before that still gets its own
    status.
    """

    def __init__(self, generation: Generation, answer: Answer, keep_alive: float):
        # Only the base class's type is used: its constructor would render a body and its length.
        self.status_code = 200
        self.background = None
        self._generation = generation
        self._answer = answer
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation as generation:
            first = await generation.next(self._keep_alive)
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            try:
                await self._write(generation, first, send)
            except (ClientLeft, asyncio.CancelledError):
                raise
            except Exception as error:
                await _send(generation, send, self._answer.failure(refusal_of(error, scope)), more=False)

    async def _write(self, generation: Generation, item: tuple[int, Given] | None, send: Send) -> None:
        begun, sent = False, 0.0 if item is None else time.monotonic()
        while True:
            chunks: list[bytes] = []
            failure: Exception | None = None
            while item is not None:  # all in one write, so that a slow connection does not slow the event loop
                try:
                    if not begun:
                        chunks.append(self._answer.begin(generation.weight_version))
                        begun = True
                    chunks.append(self._answer.event(*item))
                    item = generation.ready() if generation.unfinished else None
                except ClientLeft:
                    raise
                except Exception as error:
                    failure, item = error, None
            body = b"".join(chunks)
            if not body and time.monotonic() - sent >= self._keep_alive:  # what is held back may take long, too
                body = self._answer.KEEP_ALIVE
            if body:
                await _send(generation, send, body)
                sent = time.monotonic()
            if failure is not None:
                raise failure
            if not generation.unfinished:
                break
            item = await generation.next(max(0.0, sent + self._keep_alive - time.monotonic()))
        await _send(generation, send, self._answer.end(generation.usage), more=False)


async def _send(generation: Generation, send: Send, body: bytes, *, more: bool = True) -> None:
    """Send ``body``. Raises ClientLeft if the connection closed while this waited for the client to read."""
    if body or not more:
        await send({"type": "http.response.body", "body": body, "more_body": more})
        generation.check_client()
