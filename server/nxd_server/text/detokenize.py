"""Token ids to text, one at a time: no broken character is ever emitted, and stop strings are cut out.

Two ways to decode incrementally. Byte-level vocabularies map every token to bytes, so an incremental UTF-8 decoder is
exact. For the others (WordPiece, sentencepiece-style, byte fallback) the text of a short window of tokens is decoded
twice, without and with the new token, and the difference is what the token added; the window gives the decoder the
left neighbour that its spacing rules look at.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
MAX_PENDING = 8
"""A character has at most 4 bytes; with tokens that gave no text before it, so many that still end in U+FFFD are no
unfinished character."""
CONTEXT = 4
"""Tokens of the prompt that are kept as the left neighbours of the first generated one."""


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet backwards: printable bytes stand for themselves, the others are moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    for offset, byte in enumerate(byte for byte in range(256) if byte not in set(printable)):
        table[chr(0x100 + offset)] = byte
    return table


@functools.lru_cache(1 << 16)
def byte_level_bytes(piece: str) -> bytes:
    """The bytes of one byte-level token; a token outside that alphabet (an added one) stands for its own text."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    @property
    def byte_level(self) -> bool: ...

    @property
    def special_ids(self) -> Collection[int]: ...

    def whole_text(self, token: int) -> str | None: ...

    def id_to_token(self, token: int) -> str | None: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Feed tokens with :meth:`push`; joined, what it and :meth:`flush` return is the decoded text.

    ``prompt`` holds the tokens before the first one. Decoders that drop a text's leading space then keep it where
    the text only goes on; after a special token a new text begins.
    """

    def __init__(self, tokenizer: Vocabulary, skip_special_tokens: bool = True, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.byte_level else None
        self._unfinished = False
        """Whether the incremental decoder holds the first bytes of a character."""
        self._window: list[int] = []
        for token in prompt[-CONTEXT:]:
            self._window = [] if token in tokenizer.special_ids else [*self._window, token]
        self._settled = len(self._window)
        """How many tokens of the window have given their text already."""

    def push(self, token: int) -> str:
        """Text that is certain now; empty while a character is unfinished."""
        if self._skip and token in self._tokenizer.special_ids:
            return ""
        if self._utf8 is not None:
            if not self._unfinished and (whole := self._tokenizer.whole_text(token)) is not None:
                return whole  # nearly every token: found with one look
            piece = self._tokenizer.id_to_token(token)
            text = self._utf8.decode(byte_level_bytes(piece)) if piece is not None else ""
            self._unfinished = bool(self._utf8.getstate()[0])
            return text
        self._window.append(token)
        return self._difference(final=False)

    def flush(self) -> str:
        """What was held back, unfinished characters as U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._difference(final=True)

    def _difference(self, final: bool) -> str:
        before = self._decode(self._window[: self._settled])
        text = self._decode(self._window)
        pending = len(self._window) - self._settled
        if text.endswith(REPLACEMENT) and not final and pending < MAX_PENDING:
            return ""
        new = text[len(before) :]
        if new or final:
            self._window = self._window[self._settled :] if pending else self._window
            self._settled = len(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


class TextStream:
    """A detokenizer that stops at the first of some strings, and holds back text that may begin one."""

    def __init__(self, detokenizer: Detokenizer, stop: Iterable[str] = ()):
        self._detokenizer = detokenizer
        self._stops = tuple(stop)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing more is emitted after it."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Text to show after ``token``; check :attr:`matched` afterwards.

        ``may_stop=False`` (a minimum length is not reached yet) lets stop strings through as text.
        """
        return self._take(self._detokenizer.push(token), may_stop, final=False)

    def flush(self, *, may_stop: bool = True) -> str:
        """What was held back. A stop string completed by the last bytes still counts."""
        return self._take(self._detokenizer.flush(), may_stop, final=True)

    def _take(self, new: str, may_stop: bool, final: bool) -> str:
        if self.matched is not None:
            return ""
        if not self._stops or not may_stop:
            text, self._held = self._held + new, ""
            return text
        text = self._held + new
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            # The first to be complete wins, whatever the tokens' borders; of two that end together the longer.
            place, self.matched = min(found, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self._held = ""
            return text[:place]
        keep = 0 if final else max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, and shorter than it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
