"""A streaming client for the OpenAI routes that uses only the standard library and measures times."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import NxdError


class ServerError(NxdError):
    """The server refused a request or broke off the stream."""


@dataclass(frozen=True)
class Answer:
    """One streamed answer and its times, in seconds after the request was sent."""

    text: str
    tokens: int
    first_token: float
    total: float

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token, in tokens per second."""
        return (self.tokens - 1) / max(self.total - self.first_token, 1e-9)


def stream_answer(port: int, request: Mapping[str, Any], write: Callable[[str], None], timeout: float = 60) -> Answer:
    """Send a chat (with ``messages``) or a completion (with ``prompt``) to the server on this machine, and pass each
    piece of text to ``write`` as it arrives. ``request`` is the body, without the fields about streams.

    Raises ServerError if the server refuses, or ends the stream without ``[DONE]``.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
    body = json.dumps({**request, "stream": True, "stream_options": {"include_usage": True}})
    try:
        start = time.monotonic()
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ServerError(f"the server answered {response.status}: {response.read().decode(errors='replace')}")
        pieces: list[str] = []
        first = None
        tokens, complete = 0, False
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                complete = True
                break
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise ServerError(f"the stream broke off: {event['error']['message']}")
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                if text := choice.get("text") or choice.get("delta", {}).get("content"):
                    first = first or time.monotonic()
                    pieces.append(text)
                    write(text)
        if not complete or first is None:
            raise ServerError("the server closed the stream before the end")
        return Answer("".join(pieces), tokens, first - start, time.monotonic() - start)
    finally:
        connection.close()
