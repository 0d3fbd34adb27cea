"""Instructor, in its modes for OpenAI's client."""

from __future__ import annotations

from typing import Any

import instructor
import openai

from tests.integration.clients.asked import MESSAGE, MODEL, Verdict

PACKAGES = ["instructor"]
ASK: dict[str, Any] = {"model": MODEL, "messages": [MESSAGE], "response_model": Verdict}


def _client(url: str, mode: str) -> Any:
    client = openai.OpenAI(base_url=url, api_key="x", max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


def structured_output(url: str) -> list[Any]:
    found = [_client(url, mode).create(**ASK) for mode in ("TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS")]
    *_, last = _client(url, "TOOLS").create_partial(**ASK)
    return [*found, Verdict(ok=last.ok)]
