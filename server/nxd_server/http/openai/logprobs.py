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


def prompt_logprobs(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence, top: int) -> list[dict | None]:
    """Return vLLM's ``prompt_logprobs``: of each token but the first, its entry and those of the likeliest tokens, by
    their ids; ``rank`` is null for one that is not among these. ``scores``: as in ``PromptEvent``."""

    def entry(token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token)}

    found: list[dict | None] = [None]
    for token, (logprob, likeliest) in zip(prompt[1:], scores, strict=True):
        entries = {str(one): entry(one, value, rank) for rank, (one, value) in enumerate(likeliest[:top], 1)}
        rank = next((rank for rank, (one, _) in enumerate(likeliest, 1) if one == token), None)
        found.append({str(token): entry(token, logprob, rank), **entries})
    return found


class LegacyLogprobs:
    """The ``logprobs`` object of ``/v1/completions`` for one choice, built token by token.

    ``text_offset`` counts characters of the answered text, which lacks special tokens and, in some vocabularies, the
    first space; a token that starts inside a character has the offset of that character.
    """

    def __init__(self, tokenizer: Tokenizer, top: int, before: Sequence[int] = (), skip_special: bool = True):
        """``before``: the tokens that the text continues; it and ``skip_special`` as for the engine's detokenizer."""
        self._tokenizer = tokenizer
        self._top = top
        self._offset = 0
        self._text = Detokenizer(tokenizer, before, skip_special)
        self._parts = self._empty()

    @staticmethod
    def _empty() -> dict[str, list]:
        return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, prompt: Sequence[int], scores: Sequence) -> None:
        """Add a prompt that the text begins with, whose first token has no log-probability."""
        self._add(prompt[0], None, ())
        for token, (logprob, top) in zip(prompt[1:], scores, strict=True):
            self._add(token, logprob, top)

    def add(self, event: TokenEvent) -> None:
        self._add(event.token, event.logprob, event.top)

    def _add(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        name = self._name(token)
        self._parts["tokens"].append(name)
        self._parts["token_logprobs"].append(None if logprob is None else finite(logprob))
        likeliest: dict[str, float] = {}
        for one, value in top[: self._top]:
            likeliest.setdefault(self._name(one), finite(value))
        if logprob is not None:
            likeliest.setdefault(name, finite(logprob))  # the chosen token is always included
        self._parts["top_logprobs"].append(None if logprob is None else likeliest)
        self._parts["text_offset"].append(self._offset)
        self._offset += len(self._text.push(token))

    def _name(self, token: int) -> str:
        """Return a token in the format of completions: bytes that are not text become ``bytes:\\xe2\\x80``."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def take(self) -> dict[str, list]:
        """Return what was added since the last call."""
        parts, self._parts = self._parts, self._empty()
        return parts
