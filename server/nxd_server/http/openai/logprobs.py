"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from nxd_server.engine.request import TokenEvent
from nxd_server.text.detokenize import Detokenizer
from nxd_server.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""Replaces the logarithm of zero, which JSON cannot hold; OpenAI uses this value too."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def chat_logprob(tokenizer: Tokenizer, event: TokenEvent, top: int) -> dict[str, Any]:
    """Return one entry of ``logprobs.content``."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    return {
        **entry(event.token, event.logprob),
        "top_logprobs": [entry(token, logprob) for token, logprob in event.top[:top]],
    }


def legacy_name(data: bytes) -> str:
    """Return a token in the format of completions: bytes that are not text become ``bytes:\\xe2\\x80``."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LegacyLogprobs:
    """The ``logprobs`` object of ``/v1/completions`` for one choice, built token by token.

    ``text_offset`` counts characters of the answered text, which lacks special tokens and, in some vocabularies, the
    first space; a token that starts inside a character has the offset of that character.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, before: Sequence[int] = ()):
        """``before``: the tokens that the text continues, as for the engine's detokenizer."""
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._text = Detokenizer(tokenizer, before)
        self._parts = self._empty()

    @staticmethod
    def _empty() -> dict[str, list]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add(self, event: TokenEvent) -> None:
        data = self._tokenizer.token_bytes(event.token)
        self._parts["tokens"].append(legacy_name(data))
        self._parts["token_logprobs"].append(finite(event.logprob))
        likeliest = {
            legacy_name(self._tokenizer.token_bytes(token)): finite(value) for token, value in event.top[: self._top]
        }
        likeliest.setdefault(legacy_name(data), finite(event.logprob))  # the chosen token is always included
        self._parts["top_logprobs"].append(likeliest)
        self._parts["text_offset"].append(self._offset)
        self._offset += len(self._text.push(event.token))

    def take(self) -> dict[str, list]:
        """Return what was added since the last call."""
        parts, self._parts = self._parts, self._empty()
        return parts
