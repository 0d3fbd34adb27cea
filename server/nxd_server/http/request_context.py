"""What goes on around every request, and what its route is given: its key, its id, its body, the service, the model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nxd_server.accounts import Account
from nxd_server.engine.admission import WholeRequest
from nxd_server.engine.request import check_prompt
from nxd_server.errors import (
    DEADLINE_GRACE,
    EngineUnavailableError,
    ended_early,
    forget_frames,
    not_finished,
)
from nxd_server.http.error_responses import ApiError, as_api_error, bad_request, clip
from nxd_server.http.keys import OPEN_PATHS, Keys
from nxd_server.http.ops.logs import log_access
from nxd_server.http.ops.metrics import Metrics
from nxd_server.http.origins import Origins
from nxd_server.http.protocol import Connections
from nxd_server.http.request_body import Bodies, Body, ClientLeft, DrainingReceive, client_left, default_limit
from nxd_server.http.response_store import ResponseStore
from nxd_server.http.scope_keys import ARRIVED, CONTEXT, CROWDED, FIELDS, IGNORED, REFUSAL, REQUEST_ID, WHOLE
from nxd_server.threads import ConcurrencyLimit, Doorbell

if TYPE_CHECKING:
    from nxd_server.app.models import Models
    from nxd_server.app.replica import Replica
    from nxd_server.app.service import Service
    from nxd_server.engine.sampling_params import SamplingParams
    from nxd_server.http.ops.traces import Traces
    from nxd_server.settings import ServerSettings
    from nxd_server.text.grammars import CompiledGrammar


BodyT = TypeVar("BodyT", bound=Body)
T = TypeVar("T")
logger = logging.getLogger("nxd_server.http")
ID_HEADER = b"x-request-id"
WEIGHTS_HEADER = b"x-weight-version"
IGNORED_HEADER = b"x-ignored-fields"
MOST_IGNORED = 32
"""Fields that the header names."""
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
CROWD = "the server has reached its limit of connections (max_connections), and all of them are being answered"
CLOSE = {"connection": "close"}
CLIENT_CLOSED = 499
"""nginx's log status for a client that disconnected; it is never sent."""
ANTHROPIC_PATH = "/v1/messages"
"""Of the routes of Anthropic's API, whose errors have its form."""
TGI_PATHS = frozenset({"/", "/generate", "/generate_stream"})
"""Those of text-generation-inference."""
INLINE_TEXT = 4096
"""A longer text is tokenized in a thread, where the library releases the GIL."""
ENCODERS = 2
"""Threads for tokenizing, and as many for making tensors. A running text cannot be stopped, but no more than these
continue after their clients disconnected."""


class Context:
    """The parts of the application, at ``app.state.context``."""

    def __init__(self, models: Models, settings: ServerSettings):
        self.models, self.settings = models, settings
        self.service = models.services[0]
        """The one that a request is for, once its body is known: see :func:`choose_model`."""
        self.asked_for: str | None = None
        """What the request calls it."""
        self.traces: Traces | None = None
        self.connections = Connections(settings)
        self.keys = Keys(settings)
        self.metrics = Metrics(models.services, self.connections, self.keys)
        self.origins = Origins(settings, keyless=not self.keys.closed)
        self.encoders, self.tensors, self.grammars = (
            ConcurrencyLimit(what, width, settings.max_queued_requests)
            for what, width in (("prompts", ENCODERS), ("tensors", ENCODERS), ("grammars", 1))
        )
        self.bodies = Bodies()
        self.responses = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
        self.bell = Doorbell()
        self.in_flight: set[DrainingReceive] = set()
        """The requests being answered."""


def context_of(request: Request) -> Context:
    return request.scope.get(CONTEXT) or request.app.state.context


def choose_model(request: Request, name: str | None) -> Service:
    """From here on, the request's context has the service of the model ``name``, which is returned. Raises as
    :meth:`Models.named`."""
    context = request.scope[CONTEXT] = copy.copy(context_of(request))
    context.asked_for = name
    context.service = context.models.named(name)
    return context.service


async def on_a_copy(request: Request, work: Callable[[Replica], Awaitable[T]]) -> T:
    """Return the result of ``work`` with one of the model's copies; with another one, if that is lost meanwhile."""
    service = context_of(request).service
    replica = service.choose()
    try:
        return await work(replica)
    except EngineUnavailableError:
        with contextlib.suppress(EngineUnavailableError):
            other = service.choose(avoid=[replica])
            request.scope[WHOLE] = whole_of(request).again()
            return await work(other)
        raise


def whole_of(request: Request) -> WholeRequest:
    """Return the object for submitting all parts of the request, so that the same weights answer them."""
    return request.scope[WHOLE]


async def json_body(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object. Raises as :meth:`Bodies.read_json`."""
    context = context_of(request)
    settings = context.settings
    limit = settings.max_body_bytes or max(map(default_limit, context.models.services))
    return await context.bodies.read_json(request, limit, settings.request_timeout, settings.connection_timeout)


def endpoint(
    kind: type[BodyT], handler: Callable[[Request, BodyT], Awaitable[Any]], ready: bool, only_admin: bool
) -> Callable[[Request], Awaitable[Any]]:
    """Return the endpoint of a route whose body is parsed by ``kind``: strictly, with errors in our format.

    ``ready``: only while requests may be queued. ``only_admin``: only with the admin key.
    """

    async def answer(request: Request) -> Any:
        if only_admin:
            context_of(request).keys.check_admin(request.scope)
        if ready:  # before the body, which an unavailable server need not read
            context_of(request).models.require_ready()
        return await answered(request, kind, handler, await json_body(request))

    return answer


async def answered(
    request: Request, kind: type[BodyT], handler: Callable[[Request, BodyT], Awaitable[Any]], data: dict[str, Any]
) -> Any:
    """Return what ``handler`` answers to ``data``, parsed by ``kind``, with the model that it names."""
    body = kind.parse(data)
    choose_model(request, body.asks_for)
    whole_of(request).priority = getattr(body, "priority", 0)
    request.scope[IGNORED] = body.ignored
    return await handler(request, body)


def require_task(request: Request, route: str, *tasks: str) -> Service:
    """Return the request's service. Raises ApiError 400 if its task is none of those of the route; 503 until the
    artifact is known."""
    service = context_of(request).service
    service.require_ready()
    if service.task not in tasks:
        raise bad_request(
            f"{route} needs a model traced for {' or '.join(tasks)}; {service.model_name!r} was traced for "
            f"{service.task or 'no task of its own'}: use {service.main_route}",
            code="task_not_supported",
        )
    return service


def seconds_left(request: Request) -> float:
    """Return what is left of the time that the request may take in total. Raises DeadlineExceededError for nothing."""
    now, limit = time.monotonic(), context_of(request).settings.request_timeout
    left = request.scope.get(ARRIVED, now) + limit - now
    if left <= 0:
        raise not_finished(limit)
    return left


async def unless_left(request: Request, work: Awaitable[T], timeout: float | None = None) -> T:
    """Return the result of ``work``, which is cancelled if the client disconnects or the request's time is up.

    ``timeout``: in seconds; by default what is left of the request's time.

    Raises ClientLeft, and whatever ``work`` raises; the request's body must have been read.
    """
    context = context_of(request)
    task, watcher = asyncio.ensure_future(work), asyncio.create_task(client_left(request.receive))
    try:
        timeout = seconds_left(request) if timeout is None else timeout
        await asyncio.wait({task, watcher}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watcher.done():
            context.metrics.disconnected()
            raise ClientLeft
        raise not_finished(context.settings.request_timeout)
    finally:
        task.cancel()
        watcher.cancel()


async def wait_all(request: Request, submit: Sequence[Callable[[], Future[T]]], *, timeout: float) -> list[T]:
    """Submit all calls or none, and wait for all results.

    Args:
        submit: each queues one call.
        timeout: seconds in total.

    Raises:
        ClientLeft: the connection closed; calls that were not running yet are cancelled.
        NxdError: a call failed, or the deadline passed.
    """
    futures: list[Future[T]] = []
    try:
        for one in submit:
            futures.append(one())
        results = asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
        try:
            return await unless_left(request, results, timeout + DEADLINE_GRACE)
        except (asyncio.CancelledError, CancelledError):
            if results.done():  # cancelled by the engine, not by this task's canceller
                raise ended_early() from None
            raise
    finally:
        for future in futures:
            future.cancel()


async def encode_text(
    context: Context, text: str, field: str, *, special: bool = True, last: int | None = None
) -> list[int]:
    """Return the token ids of ``text``, or the ``last`` of them, special tokens included.

    Raises RequestError naming ``field``, at once for a huge text; PromptTooLongError if there are more than the model
    takes.
    """
    service = context.service
    tokenizer = service.require_tokenizer()
    tokenizer.check_length(text, service.max_len, field)
    most = service.max_len
    encode = functools.partial(tokenizer.encode, text, add_special_tokens=special, field=field, most=most, last=last)
    return encode() if len(text) <= INLINE_TEXT else await context.encoders.run(encode)


async def compiled_grammar(request: Request, params: SamplingParams) -> CompiledGrammar | None:
    """Return the grammar that ``params`` asks for, if any. Raises RequestError if it is not valid."""
    if params.structured_outputs is None:
        return None
    context = context_of(request)
    work = functools.partial(context.service.require_engine().grammar_of, params)
    return await unless_left(request, context.grammars.run(work))


async def encode_prompts(
    context: Context, prompts: list[str | list[int]], field: str, *, special: bool = True, last: int | None = None
) -> list[list[int]]:
    """Return the token ids of prompts that are given as texts or token ids."""
    service = context.service
    several = len(prompts) > 1
    tokens = []
    for place, prompt in enumerate(prompts):
        path = f"{field}[{place}]" if several else field
        if isinstance(prompt, str):
            ids = await encode_text(context, prompt, path, special=special, last=last)
        else:
            ids = prompt[-last:] if last else prompt
        if several:
            await asyncio.sleep(0)  # let other tasks run in between
        tokens.append(check_prompt(ids, service.vocab_size, service.max_len, path))
    return tokens


class RequestMiddleware:
    """Around every request: its id, its key, its log line, its metrics, and the handling of all errors.

    Pure ASGI, so that streams pass through untouched and handlers see a disconnect themselves.
    """

    def __init__(self, app: ASGIApp, context: Context):
        self._app, self._context = app, context
        self._access_log = context.settings.access_log
        self._root = context.settings.root_path or ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.monotonic()
        path = scope["path"]
        if f"{path}/".startswith(f"{self._root}/"):  # else a proxy has stripped it
            path = path[len(self._root) :]
        scope["path"] = path.rstrip("/") or "/"
        request_id = _request_id(scope)
        scope[REQUEST_ID], scope[ARRIVED] = request_id, begin
        whole = scope[WHOLE] = WholeRequest()
        status, sent, started = 0, 0, False
        counted: Account | None = None

        body = DrainingReceive(receive, scope)

        async def count(message: Message) -> None:
            nonlocal status, sent, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                headers = [*message.get("headers", []), (ID_HEADER, request_id.encode())]
                if body.body_left and (b"connection", b"close") not in headers:  # the rest of the request is not read
                    headers.append((b"connection", b"close"))
                if scope["method"] == "POST":
                    headers += whole.account.headers()
                if (version := scope[WHOLE].version) is not None:
                    headers.append((WEIGHTS_HEADER, b"%d" % version))
                if ignored := scope.get(IGNORED):
                    names = (clip(name).encode("ascii", "replace") for name in ignored[:MOST_IGNORED])
                    headers.append((IGNORED_HEADER, b", ".join(re.sub(rb"[^!-~]|,", b"?", name) for name in names)))
                message = {**message, "headers": headers}
            else:
                sent += len(message.get("body", b""))
            await send(message)

        self._context.in_flight.add(body)
        try:
            try:
                _check_framing(scope)
                if CROWDED in scope.get("state", ()) and scope["path"] not in OPEN_PATHS:
                    raise ApiError(503, CROWD, code="too_many_connections", retry_after=1, headers=CLOSE)
                self._context.origins.check(scope)
                whole.account = self._context.keys.check(scope)
                if scope["method"] == "POST":
                    whole.account.begin()
                    counted = whole.account
                await self._app(scope, body, count)
            except ClientLeft:
                status = CLIENT_CLOSED
            except Exception as error:
                refusal = refusal_of(error, scope)
                if started:
                    raise  # closes the connection, so that the client sees an incomplete answer
                forget_frames(error)  # breaks a cycle: the scope holds the error, its frames the scope and the body
                await body.drain()
                shape = refusal.anthropic_body(request_id) if scope["path"].startswith(ANTHROPIC_PATH) else None
                shape = refusal.tgi_body() if scope["path"] in TGI_PATHS and scope["method"] == "POST" else shape
                await refusal.response(shape)(scope, receive, count)
        except ClientLeft:
            status = CLIENT_CLOSED
        finally:
            scope[WHOLE].close()
            self._context.bodies.let_go(scope)
            if counted is not None:
                counted.end()
            self._context.in_flight.discard(body)
            seconds = time.monotonic() - begin
            # The route's template, so that a scanner cannot fill the metrics with paths.
            route = getattr(scope.get("route"), "path", None) or "unmatched"
            self._context.metrics.http(scope["method"], route, status, seconds)
            if self._context.traces is not None and scope["method"] == "POST":
                self._context.traces.record(scope, route, status, seconds)
            probe = scope["path"] in OPEN_PATHS and status in (200, 503)  # some client polls every second
            if self._access_log and not probe:
                log_access(scope, status, seconds, sent)


def refusal_of(error: Exception, scope: Scope) -> ApiError:
    """Return what a request's client is told of an error, and note it for the access log. Logs a defect of ours."""
    refusal = scope[REFUSAL] = as_api_error(error, scope[REQUEST_ID]).naming(scope.get(FIELDS))
    if refusal.code == "internal_error":
        logger.exception("request %s failed", scope[REQUEST_ID])
    return refusal


def _check_framing(scope: Scope) -> None:
    """Raise ApiError 400 for a request with two lengths: a proxy may have used the other one to find its end."""
    names = [name for name, _ in scope["headers"]]
    if b"transfer-encoding" in names and (b"content-length" in names or scope["http_version"] != "1.1"):
        why = "a request has Content-Length or Transfer-Encoding (only in HTTP/1.1), not both"
        raise ApiError(400, why, code="invalid_http", headers=CLOSE)


def _request_id(scope: Scope) -> str:
    """Return the client's own id if it is harmless, else a new one."""
    for name, value in scope["headers"]:
        if name == ID_HEADER and _SAFE_ID.fullmatch(value):
            return value.decode("ascii")
    return f"req-{uuid.uuid4().hex}"
