"""Bodies that are legal, and that nobody should have to wait for."""

from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request

from nxd_server.config import ServerSettings
from nxd_server.http.body import Bodies, ClientLeft, default_limit
from nxd_server.http.errors import ApiError
from nxd_server.served import Served
from tests.http.http_servers import is_error, toy_server

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
        service = Served(tmp_path, ServerSettings())
        service._manifest = type("Manifest", (), {"metadata": metadata})  # pyright: ignore
        return default_limit(service)

    assert limit(task="generate", max_len=64) == 2 * 2**20
    assert limit(task="generate", max_len=16384) == 6 * 64 * 16384
    assert limit(task="generate", max_len=10**6) == limit(task="embed") == limit() == 16 * 2**20


def body_of(*chunks: bytes | None) -> Request:
    """A request whose body comes in ``chunks``; None is a client that leaves."""
    left = iter(chunks)

    async def receive():
        await asyncio.sleep(0)
        chunk = next(left)
        return (
            {"type": "http.disconnect"} if chunk is None else {"type": "http.request", "body": chunk, "more_body": True}
        )

    return Request({"type": "http", "headers": []}, receive)


@pytest.mark.check
def test_all_bodies_together_have_a_limit_and_what_they_held_is_free_again():
    async def main():
        bodies = Bodies(most=100)
        parts = [b"x" * 30, b"x" * 30, None]
        several = [bodies.read_json(body_of(*parts), limit=1000, timeout=5) for _ in range(3)]
        ends = await asyncio.gather(*several, return_exceptions=True)
        refused = [end for end in ends if isinstance(end, ApiError)]
        assert refused and all((end.status, end.code) == (503, "busy") for end in refused)
        assert bodies.held == 0
        with pytest.raises(ClientLeft):
            await bodies.read_json(body_of(*parts), limit=1000, timeout=5)
        assert bodies.held == 0

    asyncio.run(main())
