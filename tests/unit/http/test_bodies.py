"""What the server limits before it costs anything: bodies in its memory, elements of lists, choices, connections."""

from __future__ import annotations

import asyncio
import resource
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from nxd_server.app.served_model import ServedModel
from nxd_server.errors import DeadlineExceededError
from nxd_server.http.body_schema import Body
from nxd_server.http.connections import most_connections
from nxd_server.http.error_responses import ApiError
from nxd_server.http.middleware import InFlight, RequestMiddleware
from nxd_server.http.openai.completions import check_choices
from nxd_server.http.openai.embeddings import tokens_of
from nxd_server.http.openai.schemas import SamplingBody
from nxd_server.http.predict import PredictBody
from nxd_server.http.request_body import Bodies, ClientLeft, default_limit
from nxd_server.http.request_context import json_body
from nxd_server.http.tokenize import DetokenizeBody, TokenizeBody
from nxd_server.settings import ServerSettings
from nxd_server.text.field_bounds import ANY
from nxd_server.text.text_process_jobs import BoundedJson, ConcurrencyLimit


def test_the_limit_of_a_body_follows_from_the_models_length(tmp_path):
    def limit(**metadata):
        service = ServedModel(tmp_path, ServerSettings())
        service._manifest = type("Manifest", (), {"metadata": metadata})  # pyright: ignore
        return default_limit(service)

    assert limit(task="generate", max_len=64) == 2 * 2**20  # 64 prompts of 64 tokens need no more
    assert limit(task="generate", max_len=16384) == 6 * 64 * 16384
    assert limit(task="generate", max_len=10**6) == limit(task="embed") == limit() == 16 * 2**20


def part(data, more=False):
    return {"type": "http.request", "body": data, "more_body": more}


def reading(bodies, receive):
    request = Request({"type": "http", "headers": []}, receive)
    return asyncio.create_task(bodies.read_json(request, 1000, 600, ANY, BoundedJson(5, 1).parse))


def test_where_bodies_have_no_more_room_the_slowest_makes_it_and_a_small_one_needs_none():
    """Two megabytes of each of 129 that then went silent had every other body refused, of twenty bytes too."""
    now = 0.0

    async def main():
        asyncio.get_running_loop().time = lambda: now
        bodies, pieces = Bodies(most=100, free=10), [asyncio.Queue() for _ in range(3)]
        silent, trickling, steady = [reading(bodies, queue.get) for queue in pieces]

        async def send(queue, data, more=True):
            nonlocal now
            now += 1
            queue.put_nowait(part(data, more))
            for _ in range(9):
                await asyncio.sleep(0)

        await send(pieces[0], b" " * 40)
        await send(pieces[1], b" " * 40)
        for _ in range(4):
            await send(pieces[1], b" ")
        await send(pieces[2], b" " * 11)
        assert bodies.held == 95 and not silent.done()
        assert await reading(bodies, AsyncMock(return_value=part(b"  {}      "))) == {}
        await send(pieces[2], b" " * 11)
        refused = silent.exception()
        assert isinstance(refused, ApiError) and (refused.status, refused.code) == (503, "busy")
        assert bodies.held == 66 and not trickling.done()
        await send(pieces[2], b" " * 35)
        assert isinstance(trickling.exception(), ApiError)
        assert bodies.held == 57
        await send(pieces[2], b"{}", more=False)
        assert await steady == {} and bodies.held == 0
        with pytest.raises(ClientLeft):
            await reading(bodies, AsyncMock(side_effect=[part(b" " * 30, True), {"type": "http.disconnect"}]))
        assert bodies.held == 0

    asyncio.run(main())


def test_what_was_parsed_of_a_large_body_counts_until_the_request_ends():
    """The texts of any number of them may wait to be tokenized."""
    bodies, seen = Bodies(), []

    async def parse(data, bounds):
        return {}

    async def app(scope, receive, send):
        await bodies.read_json(Request(scope, receive), 2**20, 600, ANY, parse)
        seen.append(bodies.held)
        if scope["path"] == "/fails":
            raise ClientLeft

    async def main():
        middleware = RequestMiddleware(app, Mock(), Mock(), InFlight(), access_log=False)
        for path, size in (("/", 2**17), ("/fails", 2**17), ("/", 2)):
            scope = {"type": "http", "method": "POST", "path": path, "headers": [], "http_version": "1.1"}
            await middleware(scope, AsyncMock(return_value=part(b" " * (size - 2) + b"{}")), AsyncMock())
            assert bodies.held == 0

    asyncio.run(main())
    assert seen == [2**17, 2**17, 0]


BODY_KINDS = [*SamplingBody.__subclasses__(), *(kind for kind in Body.__subclasses__() if kind is not SamplingBody)]
assert {PredictBody, TokenizeBody, DetokenizeBody} < set(BODY_KINDS)  # and of modules that nothing imports here, none


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind in BODY_KINDS
        for name, field in kind.model_fields.items()
        if "list" in str(field.annotation)
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_of_very_many_wrong_elements_the_first_is_an_error_and_the_others_are_not_looked_at(kind, name):
    """An error for each of 400,000 tokens kept the event loop for five seconds, and took 460 MB."""
    needed = {key: field for key, field in kind.model_fields.items() if field.is_required()}
    good = {key: [] if "list" in str(field.annotation) else "a" for key, field in needed.items()}
    with pytest.raises(ApiError) as caught:
        kind.parse({**good, name: [1.5] * 999})
    assert caught.value.status == 400 and (caught.value.param or "").startswith(name)
    error = caught.value.__context__
    assert isinstance(error, ValidationError)
    assert error.error_count() <= 3  # `stop` may be a text too, and `messages` is none


@pytest.mark.parametrize("left", [True, False], ids=["its client has left", "its time is over"])
def test_a_large_body_whose_request_is_over_is_not_parsed(left):
    """Twenty of two megabytes, whose clients had all left, held up the next one for three seconds."""
    ends: list[str] = []

    async def parse(data, bounds):
        try:
            await asyncio.Event().wait()  # as in a lane behind others
        finally:
            ends.append("ended")

    async def main():
        service = SimpleNamespace(bounded_json=SimpleNamespace(parse=parse), body_bounds=ANY)
        settings = ServerSettings(max_body_bytes=2**20, request_timeout=60 if left else 0.05)
        context = SimpleNamespace(service=service, settings=settings, bodies=Bodies(), metrics=Mock())
        messages = asyncio.Queue()
        messages.put_nowait(part(b" " * 2**17))
        if left:
            messages.put_nowait({"type": "http.disconnect"})
        scope = {"type": "http", "headers": [], "app": SimpleNamespace(state=SimpleNamespace(context=context))}
        with pytest.raises(ClientLeft if left else DeadlineExceededError):
            await asyncio.wait_for(json_body(Request(scope, messages.get)), 120)
        assert context.bodies.held == 0

    asyncio.run(main())
    assert ends == ["ended"]


def test_of_texts_to_encode_none_is_begun_after_their_client_has_left():
    """A list of 2,048 was worked off to its end, and so were the lists of a hundred clients that had left."""
    began: list[str] = []
    first, left = threading.Event(), threading.Event()

    class Encoder:
        def tokens(self, text, **_):
            began.append(text)
            first.set()
            assert left.wait(120)

    async def main():
        context = SimpleNamespace(encoders=ConcurrencyLimit("prompts", 1, 1))
        texts = ["a" * 3000] * 64
        work = asyncio.create_task(tokens_of(context, Encoder(), texts, lambda place: "input"))  # pyright: ignore
        assert await asyncio.to_thread(first.wait, 120)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        left.set()
        while context.encoders.inside:
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(began) == 1


def test_more_choices_than_a_number_can_be_written_of_are_400():
    """Python writes no whole number of more than 4300 digits."""
    with pytest.raises(ApiError, match="2 prompts with n = 999") as caught:
        check_choices(2, 10**4300 - 1, 64, 128)
    assert caught.value.status == 400 and len(caught.value.message) < 400


def test_a_million_descriptors_are_no_million_connections(monkeypatch):
    """All of them are looked at four times a second."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2**20, 2**20))
    assert most_connections(None) == 4096
    assert most_connections(20_000) == 20_000
