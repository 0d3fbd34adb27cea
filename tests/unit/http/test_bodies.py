"""What the server limits before it costs anything: bodies in its memory, elements of lists, choices, connections."""

from __future__ import annotations

import asyncio
import resource
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from nxd_server.app.service import Service
from nxd_server.errors import BodyError
from nxd_server.http.error_responses import ApiError
from nxd_server.http.openai.embeddings import tokens_of
from nxd_server.http.openai.generation import check_choices
from nxd_server.http.openai.schemas import SamplingBody
from nxd_server.http.predict import PredictBody
from nxd_server.http.protocol import most_connections
from nxd_server.http.request_body import MOST_CONTAINERS, Bodies, Body, ClientLeft, default_limit, parse_json
from nxd_server.http.tokenize import DetokenizeBody, TokenizeBody
from nxd_server.settings import ServerSettings
from nxd_server.threads import ConcurrencyLimit


def test_the_limit_of_a_body_follows_from_the_models_length(tmp_path):
    def limit(**metadata):
        service = Service(tmp_path, ServerSettings())
        service._manifest = type("Manifest", (), {"metadata": metadata})  # pyright: ignore
        return default_limit(service)

    assert limit(task="generate", max_len=64) == 2 * 2**20  # 64 prompts of 64 tokens need no more
    assert limit(task="generate", max_len=16384) == 6 * 64 * 16384
    assert limit(task="generate", max_len=10**6) == limit(task="embed") == limit() == 16 * 2**20


def part(data, more=False):
    return {"type": "http.request", "body": data, "more_body": more}


def reading(bodies, receive, silence=60, scope=None):
    scope = {} if scope is None else scope
    scope |= {"type": "http", "headers": []}
    return bodies.read_json(Request(scope, receive), 2**20, 600, silence)


def test_large_bodies_are_refused_while_others_take_all_the_room_and_small_ones_are_not():
    async def main():
        bodies, pieces, scope, small = Bodies(most=2**18 + 2**10), asyncio.Queue(), {}, {}
        first = asyncio.create_task(reading(bodies, pieces.get, scope=scope))
        pieces.put_nowait(part(b" " * 2**18, True))
        while not bodies.held:
            await asyncio.sleep(0)
        assert await reading(bodies, AsyncMock(return_value=part(b"{}")), scope=small) == {}
        with pytest.raises(ApiError) as caught:
            await reading(bodies, AsyncMock(return_value=part(b" " * 2**17)))
        assert (caught.value.status, caught.value.code) == (503, "busy")
        pieces.put_nowait(part(b"{}"))
        assert await first == {} and bodies.held == 2**18 + 4, "until both requests are over"
        for one in (scope, small, small):
            bodies.let_go(one)
        assert bodies.held == 0
        with pytest.raises(ClientLeft):
            await reading(bodies, AsyncMock(side_effect=[part(b" " * 30, True), {"type": "http.disconnect"}]))
        assert bodies.held == 0

    asyncio.run(main())


NOT_JSON = {
    "empty": b" ",
    "a list": b"[1]",
    "more": b'{"a": 1} x',
    "a control character": b'{"a": "\x01"}',
    "NaN": b'{"a": NaN}',
    "no UTF-8": b'{"a": "\xff"}',
    "a lone surrogate": b'{"a": "\\ud800"}',
    "deep": b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
    "one long number": b'{"a": ' + b"1" * 2**20 + b"}",
    "very many lists": b'{"a": [' + b"[]," * MOST_CONTAINERS + b"1]}",
}


@pytest.mark.parametrize("case", NOT_JSON)
def test_what_is_no_strict_json_or_takes_long_to_parse_is_refused(case):
    with pytest.raises(BodyError) as caught:
        parse_json(NOT_JSON[case])
    assert caught.value.code == ("body_too_complex" if case == "very many lists" else "invalid_json")


def test_large_json_is_taken():
    assert len(parse_json(b'{"a": [' + b"1," * 2**20 + b"1]}")["a"]) == 2**20 + 1
    assert parse_json(b'{"a": [' + b"[]," * (MOST_CONTAINERS - 10) + b"1]}")


BODY_KINDS = [
    kind
    for base in (SamplingBody, PredictBody.__base__, TokenizeBody.__base__, Body, Body.__base__)
    for kind in base.__subclasses__()
]
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
