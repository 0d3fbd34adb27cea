"""``request_timeout`` is for the whole request, whatever its body and its texts took."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from starlette.requests import Request

from nxd_server.errors import DeadlineExceededError, QueueFullError
from nxd_server.http.openai.completions import completions
from nxd_server.http.openai.schemas import CompletionBody
from nxd_server.settings import ServerSettings
from tests.support.http.http_toy import toy_tokenizer


def submitted_with(age: float) -> float:
    """What a completion gives the engine as its time, ``age`` seconds after it arrived, of 60 in all."""
    given: list[float] = []

    def submit(*args, timeout, **options):
        given.append(timeout)
        raise QueueFullError("as if")

    service = SimpleNamespace(
        task="generate", model_name="toy", top_logprobs=20, max_len=64, vocab_size=97, room=9, sampling_defaults={},
        continues_prompts=True, require_ready=Mock(), check_room=Mock(), require_tokenizer=toy_tokenizer, submit=submit,
    )  # fmt: skip
    context = SimpleNamespace(service=service, settings=ServerSettings(request_timeout=3600), metrics=Mock())

    async def main():
        scope = {"type": "http", "headers": [], "app": SimpleNamespace(state=SimpleNamespace(context=context))}
        scope |= {"nxd.arrived": time.monotonic() - age, "nxd.whole": Mock()}
        with pytest.raises(QueueFullError):
            await completions(Request(scope, asyncio.Event().wait), CompletionBody(prompt="hello"))

    asyncio.run(main())
    return given[0]


def test_a_request_has_what_its_body_left_it():
    assert submitted_with(age=3000) <= 600


def test_a_request_whose_time_is_over_is_not_begun():
    with pytest.raises(DeadlineExceededError, match="not finished after 3600 s"):
        submitted_with(age=3601)
