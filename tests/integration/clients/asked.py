"""What every client asks, of the model that tests/support/http/taught_model.py teaches."""

from __future__ import annotations

from typing import Any

import pydantic

MODEL = "model"
"""The name of each server's."""
QUESTION = "Rain?"
MESSAGE: dict[str, Any] = {"role": "user", "content": QUESTION}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
QUERY, TEXTS = "what does raise do", ["for loops iterate", "A raise statement", "while True"]


class Verdict(pydantic.BaseModel):
    """Whether it will rain."""

    ok: bool


def weather(city: str) -> str:
    """Tells the weather of a city."""
    assert city == "Bern"
    return "dry"
