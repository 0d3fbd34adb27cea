"""The context of a request, for every route: its id, its body, the service, the model it names."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request

from nxd_server.engine.admission import WholeRequest
from nxd_server.engine.request import check_token_ids
from nxd_server.errors import DEADLINE_GRACE, PromptTooLongError, ended_early, not_finished
from nxd_server.http.body_schema import Body
from nxd_server.http.error_responses import ApiError, bad_request, clip
from nxd_server.http.request_body import Bodies, ClientLeft, client_left, default_limit
from nxd_server.http.scope_keys import ARRIVED, REQUEST_ID, WHOLE
from nxd_server.text.concurrency_limit import ConcurrencyLimit

if TYPE_CHECKING:
    from nxd_server.app.service import Service
    from nxd_server.engine.sampling_params import SamplingParams
    from nxd_server.http.api_keys import Keys
    from nxd_server.http.ops.metrics import Metrics
    from nxd_server.settings import ServerSettings
    from nxd_server.text.grammars import CompiledGrammar

BodyT = TypeVar("BodyT", bound=Body)
T = TypeVar("T")
INLINE_TEXT = 4096
"""A longer text is tokenized in a thread, where the library releases the GIL."""
ENCODERS = 2
"""Threads for tokenizing, and as many for making tensors. A running text cannot be stopped, but no more than these
continue after their clients disconnected."""


@dataclass(frozen=True)
class Context:
    """The parts of the application, at ``app.state.context``."""

    service: Service
    settings: ServerSettings
    metrics: Metrics
    keys: Keys
    encoders: ConcurrencyLimit
    tensors: ConcurrencyLimit
    grammars: ConcurrencyLimit
    bodies: Bodies


def context_of(request: Request) -> Context:
    return request.app.state.context


def request_id(request: Request) -> str:
    return request.scope.get(REQUEST_ID, "")


def require_admin(request: Request) -> None:
    """Raise ApiError 401 or 403 unless the request carries the admin key."""
    context_of(request).keys.check_admin(request.scope)


def whole_of(request: Request) -> WholeRequest:
    """Return the object for submitting all parts of the request, so that the same weights answer them."""
    return request.scope[WHOLE]


async def json_body(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object. Raises as :meth:`Bodies.read_json`."""
    context = context_of(request)
    settings = context.settings
    limit = settings.max_body_bytes or default_limit(context.service)
    return await context.bodies.read_json(request, limit, settings.request_timeout, settings.connection_timeout)


async def parse(request: Request, kind: type[BodyT]) -> BodyT:
    """Return the body as ``kind``. Raises ApiError 400, 413 or 415, or ClientLeft."""
    return kind.parse(await json_body(request))


def check_model(service: Service, name: str | None) -> str | None:
    """Return the adapter ``name``; None for the served model itself. Raises 404 for another name."""
    if name is None or name == service.model_name:
        return None
    adapters = [adapter.name for adapter in service.adapters()]
    if name not in adapters:
        known = ", ".join(map(repr, [service.model_name, *adapters]))
        raise ApiError(
            404,
            f"the model {clip(name)!r} does not exist; this server has {known}",
            param="model",
            code="model_not_found",
        )
    return name


def require_task(service: Service, route: str, *tasks: str) -> None:
    """Raise 400 if the artifact's task does not match the route; 503 until the artifact is known."""
    service.require_ready()
    if service.task not in tasks:
        raise bad_request(
            f"{route} needs a model traced for {' or '.join(tasks)}; {service.model_name!r} was traced for "
            f"{service.task or 'no task of its own'}: use {service.main_route}",
            code="task_not_supported",
        )


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


async def encode_text(context: Context, text: str, field: str, *, special: bool = True) -> list[int]:
    """Return the token ids of ``text``. Raises RequestError naming ``field``, at once for a huge text;
    PromptTooLongError if there are more than the model takes."""
    service = context.service
    tokenizer = service.require_tokenizer()
    tokenizer.check_length(text, service.max_len, field)
    most = service.max_len
    encode = functools.partial(tokenizer.encode, text, add_special_tokens=special, field=field, most=most)
    return encode() if len(text) <= INLINE_TEXT else await context.encoders.run(encode)


async def compiled_grammar(request: Request, params: SamplingParams) -> CompiledGrammar | None:
    """Return the grammar that ``params`` asks for, if any. Raises RequestError if it is not valid."""
    if params.structured_outputs is None:
        return None
    context = context_of(request)
    work = functools.partial(context.service.require_engine().grammar_of, params)
    return await unless_left(request, context.grammars.run(work))


async def encode_prompts(
    context: Context, prompts: list[str | list[int]], field: str, *, special: bool = True
) -> list[list[int]]:
    """Return the token ids of prompts that are given as texts or token ids."""
    service = context.service
    several = len(prompts) > 1
    tokens = []
    for place, prompt in enumerate(prompts):
        path = f"{field}[{place}]" if several else field
        if isinstance(prompt, str):
            ids = await encode_text(context, prompt, path, special=special)
        else:
            ids = prompt
        if several:
            await asyncio.sleep(0)  # let other tasks run in between
        if len(ids) > service.max_len:  # before each id is checked
            raise PromptTooLongError(len(ids), service.max_len, path)
        tokens.append(check_token_ids(ids, service.vocab_size, path))
    return tokens
