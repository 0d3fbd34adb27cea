"""The end of each stream chunk: token counts so far, and padding, if the request asks for them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from nxd_server.engine.events import Usage
from nxd_server.http.openai.schemas import StreamOptions

PADDED_TO = 64
"""Padded chunks are a multiple of this many bytes long, so that their sizes reveal little about the tokens."""


def usage_object(usage: Usage, reasoning: int | None = None) -> dict[str, Any]:
    """Return the field ``usage``; ``reasoning``: the tokens of the answer that are, None for a model without."""
    counts: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if reasoning is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return counts


class Tails:
    """Completes the chunks of one request, whose choice ``c`` answers prompt ``c // n``.

    Without ``continuous_usage_stats`` the counts are null until the last chunk, without ``include_usage`` absent.
    """

    def __init__(self, options: StreamOptions | None, prompt_lengths: Sequence[int], n: int):
        self._prompts, self._n = prompt_lengths, n
        self._counts = bool(options and options.include_usage and options.continuous_usage_stats)
        self._pads = bool(options and options.include_obfuscation)
        self._end = b'],"usage":null' if options and options.include_usage else b"]"
        self._tokens: dict[int, int] = {}

    def count(self, choice: int) -> None:
        """Count one more token of ``choice``."""
        if self._counts:
            self._tokens[choice] = self._tokens.get(choice, 0) + 1

    def close(self, choice: int, chunk: bytes) -> bytes:
        """Complete ``chunk``, which lacks the end after its only choice, to an event."""
        if self._counts:
            usage = Usage(self._prompts[choice // self._n], self._tokens.get(choice, 0))
            chunk += b'],"usage":' + json.dumps(usage_object(usage)).encode()
        else:
            chunk += self._end
        if self._pads:
            chunk += b',"obfuscation":"'
            short = -(len(chunk) + len(b'"}\n\n')) % PADDED_TO
            chunk += secrets.token_hex(PADDED_TO)[:short].encode() + b'"'
        return chunk + b"}\n\n"
