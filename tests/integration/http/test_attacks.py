"""Legal bodies that must not delay other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from nxd_server.app.served_model import ServedModel
from nxd_server.errors import DeadlineExceededError
from nxd_server.http.body_schema import Body
from nxd_server.http.error_responses import ApiError
from nxd_server.http.middleware import InFlight, RequestMiddleware
from nxd_server.http.openai.embeddings import tokens_of
from nxd_server.http.openai.schemas import SamplingBody
from nxd_server.http.predict import PredictBody
from nxd_server.http.request_body import Bodies, ClientLeft, default_limit
from nxd_server.http.request_context import encode_prompts, json_body
from nxd_server.http.tokenize import DetokenizeBody, TokenizeBody
from nxd_server.settings import ServerSettings
from nxd_server.text.field_bounds import ANY
from nxd_server.text.text_process_jobs import BoundedJson, ConcurrencyLimit
from tests.support.http.http_servers import http_request, is_error, raw, toy_server
from tests.support.processes import descendants

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def roomy():
    """A server that takes bodies of 16 MiB, whatever its model is."""
    with toy_server(max_body_bytes=16 * 2**20, access_log=False) as server:
        yield server


# Made when they are asked for: together they are 120 MB, and take seconds.
BODIES = {
    "prompts": (COMPLETIONS, lambda: b'{"prompt": [' + b"[1]," * 3_700_000 + b"[1]]}"),
    "stops": (COMPLETIONS, lambda: b'{"prompt": "a", "stop": [' + b'"",' * 5_000_000 + b'""]}'),
    "harmless": (COMPLETIONS, lambda: b'{"prompt": "a", "user": [' + b"1," * 8_000_000 + b"1]}"),
    "ids": ("/detokenize", lambda: b'{"tokens": [' + b"5," * 8_000_000 + b"5]}"),
    "variables": (
        CHAT,
        lambda: json.dumps({"messages": HELLO, "chat_template_kwargs": {f"v{n}": 1 for n in range(10**6)}}).encode(),
    ),
    "messages": (CHAT, lambda: b'{"messages": [' + b"{}," * 5_000_000 + b"{}]}"),
    "parts": ("/tokenize", lambda: b'{"messages": [{"content":[' + b"[]," * 5_000_000 + b"[]]}]}"),
    "tensor": ("/invocations", lambda: b'{"inputs": {"x": [' + b"0," * 8_000_000 + b"0]}}"),
}


@pytest.mark.parametrize("name", BODIES)
def test_millions_of_values_are_counted_and_not_read(roomy, name):
    """The parser held the event loop for up to five seconds of each."""
    path, body = BODIES[name]
    data = body()
    assert len(data) <= 16 * 2**20
    is_error(roomy.post(path, content=data), 400, code="body_too_complex")
    assert roomy.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_limit_of_a_body_follows_from_the_models_length(toy, tmp_path):
    """64 prompts of 64 tokens need no more than the two megabytes that every server takes."""
    is_error(toy.post(COMPLETIONS, content=b'{"prompt": "' + b"a" * 3 * 2**20 + b'"}'), 413)

    def limit(**metadata):
        service = ServedModel(tmp_path, ServerSettings())
        service._manifest = type("Manifest", (), {"metadata": metadata})  # pyright: ignore
        return default_limit(service)

    assert limit(task="generate", max_len=64) == 2 * 2**20
    assert limit(task="generate", max_len=16384) == 6 * 64 * 16384
    assert limit(task="generate", max_len=10**6) == limit(task="embed") == limit() == 16 * 2**20


def body_of(*chunks: bytes | None) -> Request:
    """A request whose body comes in ``chunks``; None is a client that leaves."""
    left = list(chunks)

    async def receive():
        await asyncio.sleep(0)
        chunk = left.pop(0)
        return (
            {"type": "http.disconnect"}
            if chunk is None
            else {"type": "http.request", "body": chunk, "more_body": bool(left)}
        )

    return Request({"type": "http", "headers": []}, receive)


PARTS = [b"x" * 30, b"x" * 30, None]


def reading(bodies, request):
    return asyncio.create_task(bodies.read_json(request, 1000, 600, ANY, BoundedJson(5, 1).parse))


def test_all_bodies_together_have_a_limit_and_what_they_held_is_free_again():
    async def main():
        bodies = Bodies(most=100, free=10)
        several = [reading(bodies, body_of(*PARTS)) for _ in range(3)]
        ends = await asyncio.gather(*several, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, ApiError)]
        assert refused and all((end.status, end.code) == (503, "busy") for end in refused)
        assert bodies.held == 0
        with pytest.raises(ClientLeft):
            await reading(bodies, body_of(*PARTS))
        assert bodies.held == 0

    asyncio.run(main())


def test_where_bodies_have_no_more_room_the_slowest_makes_it_and_a_small_one_needs_none():
    """Two megabytes of each of 129 that then went silent had every other body refused, of twenty bytes too."""
    now = 0.0

    async def main():
        asyncio.get_running_loop().time = lambda: now
        bodies, pieces = Bodies(most=100, free=10), [asyncio.Queue() for _ in range(3)]
        silent, trickling, steady = [
            reading(bodies, Request({"type": "http", "headers": []}, queue.get)) for queue in pieces
        ]

        async def send(queue, data, more=True):
            nonlocal now
            now += 1
            queue.put_nowait({"type": "http.request", "body": data, "more_body": more})
            for _ in range(9):
                await asyncio.sleep(0)

        await send(pieces[0], b" " * 40)
        await send(pieces[1], b" " * 40)
        for _ in range(4):
            await send(pieces[1], b" ")
        await send(pieces[2], b" " * 11)
        assert bodies.held == 95 and not silent.done()
        assert await reading(bodies, body_of(b"  {}      ")) == {}
        await send(pieces[2], b" " * 11)
        assert isinstance(silent.exception(), ApiError) and silent.exception().code == "busy"
        assert bodies.held == 66 and not trickling.done()
        await send(pieces[2], b" " * 35)
        assert isinstance(trickling.exception(), ApiError)
        assert bodies.held == 57
        await send(pieces[2], b"{}", more=False)
        assert await steady == {} and bodies.held == 0

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
            await middleware(scope, body_of(b" " * (size - 2) + b"{}").receive, AsyncMock())
            assert bodies.held == 0

    asyncio.run(main())
    assert seen == [2**17, 2**17, 0]


BODY_KINDS = [*SamplingBody.__subclasses__(), *(kind for kind in Body.__subclasses__() if kind is not SamplingBody)]
assert {PredictBody, TokenizeBody, DetokenizeBody} < set(BODY_KINDS)  # and of modules that nothing imports here, none
MESSAGE = '{"role": "user", "content": "a"}'


@pytest.mark.parametrize(  # where the body is parsed aside, and where it is not
    ("path", "data", "param", "says"),
    [
        (COMPLETIONS, '{"prompt": [' + "5," * 70_000 + "5]}", "prompt", "70001"),
        (COMPLETIONS, '{"prompt": [' + "5," * 60_000 + "5]}", "prompt", "60001"),
        (COMPLETIONS, '{"prompt": [' + "[1]," * 16_000 + "[1]]}", "prompt", "16001"),
        (COMPLETIONS, '{"prompt": [' + "[1]," * 1000 + "[1]]}", "prompt", "1001"),
        (COMPLETIONS, '{"prompt": "a", "stop": [' + '"",' * 50_000 + '""]}', "stop", "at most 1024 are taken"),
        (COMPLETIONS, '{"prompt": "a", "stop": [' + '"",' * 1024 + '""]}', "stop", "at most 1024 are taken"),
        (CHAT, '{"messages": [' + (MESSAGE + ",") * 5000 + MESSAGE + "]}", "messages", "at most 4096 are taken"),
        (CHAT, '{"messages": [' + MESSAGE + '], "chat_template_kwargs": {"a": [' + "1," * 5000 + "1]}}",
         "chat_template_kwargs", "at most 4096 are taken"),
        ("/tokenize", '{"messages": [' + (MESSAGE + ",") * 5000 + MESSAGE + "]}", "messages", "at most 4096 are taken"),
    ],
    ids=["ids", "fewer ids", "prompts", "fewer prompts", "stops", "fewer stops", "messages", "variables",
         "messages to tokenise"],
)  # fmt: skip
def test_what_is_read_and_too_much_is_a_400_of_its_field(roomy, path, data, param, says):
    assert says in is_error(roomy.post(path, content=data), 400, param)["message"]


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


def test_a_large_body_is_parsed_beside_the_server_and_nothing_of_it_stays(roomy):
    """Held up by the parser, a look at /livez and a stream's next token took a tenth of a second and more."""
    text = json.dumps({"prompt": "中\n" * 2_000_000})
    assert "characters" in is_error(roomy.post("/tokenize", content=text), 400, "prompt")["message"]
    assert roomy.metric("nxd_texts_aside", kind="bodies") == 0
    is_error(roomy.post("/tokenize", content=text[:-1]), 400, code="invalid_json")
    is_error(roomy.post("/tokenize", content=text.encode().replace(b"\\n", b"\xff")), 400, code="invalid_json")
    is_error(roomy.post("/tokenize", content=text[:-1] + ', "prompt": "a"}'), 400, code="invalid_json")
    with raw(roomy, http_request("/tokenize", text.encode())):
        pass
    roomy.wait_metric("nxd_texts_aside", 0.0)
    ids = roomy.post("/tokenize", content=json.dumps({"prompt": "a" * 2**17})).json()
    assert ids["count"] == 2**17


def test_the_parser_of_large_bodies_is_a_process_that_a_small_body_does_not_need():
    with toy_server(access_log=False) as server:
        before = descendants(server.process.pid)
        is_error(server.post("/tokenize", {"prompt": "a", "secret": "b" * 100}), 400, code="unknown_parameter")
        assert descendants(server.process.pid) == before
        is_error(server.post("/tokenize", {"prompt": "a", "secret": "b" * 2**17}), 400, code="unknown_parameter")
        assert len(descendants(server.process.pid) - before) == 1


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
        messages.put_nowait({"type": "http.request", "body": b" " * 2**17})
        if left:
            messages.put_nowait({"type": "http.disconnect"})
        scope = {"type": "http", "headers": [], "app": SimpleNamespace(state=SimpleNamespace(context=context))}
        with pytest.raises(ClientLeft if left else DeadlineExceededError):
            await asyncio.wait_for(json_body(Request(scope, messages.get)), 120)
        assert context.bodies.held == 0

    asyncio.run(main())
    assert ends == ["ended"]


def test_others_have_their_turn_between_the_prompts_of_a_request():
    """64 prompts of 4,096 ids took a tenth of a second to look at."""

    class Everything:
        max_len, vocab_size = 10, 100

    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(others())
        context = type("Context", (), {"service": Everything()})
        assert await encode_prompts(context, [[5, 6]] * 64, "prompt") == [[5, 6]] * 64  # pyright: ignore
        task.cancel()

    asyncio.run(main())
    assert turns >= 60


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
