"""Decode token ids one at a time: broken characters are never emitted, and stop strings are removed.

There are two ways to decode incrementally. Byte-level vocabularies map every token to bytes, so an incremental UTF-8
decoder is exact. For the others (WordPiece, sentencepiece-style, byte fallback) a short window of tokens is decoded
twice, without and with the new token, and the difference is the text of that token. The window holds the left
neighbours that the decoder's spacing rules need.
"""

from __future__ import annotations

import codecs
import functools
from array import array
from collections.abc import Iterable, Sequence

from nxd_server.text.tokenizer import Tokenizer, byte_level_bytes

REPLACEMENT = "\ufffd"
MAX_PENDING = 8
"""A character has at most 4 bytes. If this many tokens, including some that gave no text before, still end in U+FFFD,
it is not an unfinished character."""
CONTEXT = 4
"""Number of prompt tokens kept as left neighbours of the first generated token."""


class Detokenizer:
    """Feed tokens with :meth:`push`; its results and that of :meth:`flush`, joined, are the decoded text, without
    special tokens if it is to ``skip_special`` ones.

    ``prompt`` holds the preceding tokens. Decoders that strip the leading space of a text then keep it if the
    text continues the prompt; after a special token a new text begins.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if tokenizer.byte_level else None
        self._unfinished = False
        """Whether the incremental decoder holds the first bytes of an incomplete character."""
        self._window: list[int] = []
        for token in prompt[-CONTEXT:]:
            self._window = [] if token in tokenizer.special_ids else [*self._window, token]
        while self._window and _continues(tokenizer.id_to_token(self._window[0])):
            del self._window[0]  # the rest of a cut character: a run of bytes with it decodes to U+FFFD as a whole
        self._settled = len(self._window)
        """Number of tokens in the window whose text was already returned."""

    def push(self, token: int) -> str:
        """Return the text that is now final; empty while a character is incomplete."""
        if self._skip_special and token in self._tokenizer.special_ids:
            return ""
        if self._utf8 is not None:
            if not self._unfinished and (whole := self._tokenizer.whole_text(token)) is not None:
                return whole  # true for nearly every token, one lookup
            piece = self._tokenizer.id_to_token(token)
            text = self._utf8.decode(byte_level_bytes(piece)) if piece is not None else ""
            self._unfinished = bool(self._utf8.getstate()[0])
            return text
        if self._tokenizer.id_to_token(token) is None:
            return ""  # has no text, and would stay in the window
        self._window.append(token)
        return self._difference(final=False)

    def flush(self) -> str:
        """Return the held-back text, with incomplete characters as U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        return self._difference(final=True)

    def _difference(self, final: bool) -> str:
        before = self._decode(self._window[: self._settled])
        text = self._decode(self._window)
        pending = len(self._window) - self._settled
        if text.endswith(REPLACEMENT) and not final and pending < MAX_PENDING:
            return ""
        if not text.startswith(before):
            before = before.rstrip(REPLACEMENT)  # the prompt ended within a character, which is whole now
        new = text[len(before) :]
        if new or final:
            self._window = self._window[self._settled :] if pending else self._window
            self._settled = len(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special) if ids else ""


def _continues(piece: str | None) -> bool:
    """Whether this is a byte-fallback token of a character's second or later byte."""
    return piece is not None and len(piece) == 6 and "<0x80>" <= piece <= "<0xBF>"


class TextStream:
    """A detokenizer that stops at the first of several stop strings, and holds back text that may begin one.

    ``include``: the stop string is part of the text.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Iterable[str] = (), include: bool = False):
        self._include = include
        self._detokenizer = detokenizer
        self._stops = [_Stop(text) for text in stop]
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; no text is emitted after it."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Return the text to emit after ``token``; check :attr:`matched` afterwards.

        ``may_stop=False`` (the minimum length is not reached yet): a stop string that ends in this text is emitted.
        """
        return self._take(self._detokenizer.push(token), may_stop, final=False)

    def flush(self, *, may_stop: bool = True) -> str:
        """Return the held-back text. A stop string completed by the last bytes still counts."""
        return self._take(self._detokenizer.flush(), may_stop, final=True)

    def _take(self, new: str, may_stop: bool, final: bool) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return new
        text, place = self._held + new, len(self._held)
        for char in new:
            place += 1
            ended = [stop for stop in self._stops if stop.ends_with(char)]
            if ended and may_stop:
                # The first completed stop string wins, regardless of token boundaries; if two end together, the longer.
                self.matched = max((stop.text for stop in ended), key=len)
                self._held = ""
                return text[: place - (0 if self._include else len(self.matched))]
        keep = 0 if final else max(stop.begun for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _Stop:
    """A stop string that is searched for in a growing text (Knuth, Morris and Pratt): its length costs nothing."""

    def __init__(self, text: str):
        self.text = text
        self.begun = 0
        """Number of its characters that the text ends with, not all of them."""
        self._fallbacks = _fallbacks(text)

    def ends_with(self, char: str) -> bool:
        """Add a character to the text; return whether the text ends with the stop string now."""
        while self.begun and self.text[self.begun] != char:
            self.begun = self._fallbacks[self.begun]
        self.begun += self.text[self.begun] == char
        if self.begun < len(self.text):
            return False
        self.begun = self._fallbacks[self.begun]
        return True


@functools.lru_cache(256)
def _fallbacks(stop: str) -> array[int]:
    """Return for each size the length of the longest proper prefix of ``stop`` that ``stop[:size]`` ends with."""
    table = array("I", [0]) * (len(stop) + 1)
    size = 0
    for place in range(1, len(stop)):
        while size and stop[size] != stop[place]:
            size = table[size]
        size += stop[size] == stop[place]
        table[place + 1] = size
    return table


def overlap(text: str, tag: str, most: int | None = None) -> int:
    """Return how many of the last ``most`` characters of ``text`` may begin ``tag``."""
    most = len(text) if most is None else most
    return next((size for size in range(min(len(tag) - 1, most), 0, -1) if text.endswith(tag[:size])), 0)
