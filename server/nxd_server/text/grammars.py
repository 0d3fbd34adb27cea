"""Grammars that answers follow: which tokens may come next. The library llguidance compiles and matches them.

A :class:`Guide` belongs to one answer. Before each token it gives the sampler's mask of allowed tokens, an input of the
graphs; the sampled token moves it on. So an answer matches its grammar unless ``max_tokens`` cuts it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nxd_server.errors import GenerationError, RequestError
from nxd_server.text.library_panics import LibraryPanic, no_panics
from nxd_server.text.structured_outputs import StructuredOutputs, json_rule
from nxd_server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NO_FORCING = '%llguidance {"no_forcing": true}'
"""Else, where only one text can follow, the library allows just the tokens that its tokenizer makes of it; and where
that text is the name of a special token, it allows this token and does not take it."""
MOST_COMPILED = 64
"""Grammars that are kept: applications use a few, over and over."""


class Grammars:
    """Compiles what requests ask for, with one model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        """``vocab_size``: of the model; ``eos_token_ids``: the tokens that end an answer, allowed where it may end."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._ends = [token for token in eos_token_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def guide(self, asked: StructuredOutputs) -> Guide:
        """Return a guide for one answer. Takes up to seconds the first time, then microseconds.

        Raises RequestError if the grammar is not valid, or uses what the library does not have.
        """
        key = (asked.form, asked.text)
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
                return self._guide(matcher)
        matcher = self._matcher(asked)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
            return self._guide(matcher)

    def _guide(self, matcher: LLMatcher) -> Guide:
        return Guide(matcher.deep_copy(), self._vocab_size, self._ends)

    def _matcher(self, asked: StructuredOutputs) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise RequestError(
                asked.where, "this server was installed without llguidance: pip install 'nxd-infer[server]'"
            ) from None
        tokenizer, limits = self._library_tokenizer(asked), LLParserLimits(verbose_errors=False)
        try:
            with no_panics():
                matcher = LLMatcher(tokenizer, _grammar(asked), log_level=0, limits=limits)
        except (ValueError, LibraryPanic) as error:
            raise asked.error(asked.form, str(error)) from None
        if matcher.is_error():
            raise asked.error(asked.form, matcher.get_error())
        return matcher

    def _library_tokenizer(self, asked: StructuredOutputs) -> LLTokenizer:
        """Return the tokenizer in the library's form, built once: that takes a second for 100,000 tokens."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                raw = self._source.raw
                size = max(self._vocab_size, raw.get_vocab_size(with_added_tokens=True))
                if not self._ends:  # the library would take token 0 for it
                    raise RequestError(asked.where, "this model names no token that ends an answer")
                try:
                    with no_panics():
                        self._tokenizer = LLTokenizer(raw.to_str(), n_vocab=size, eos_token=self._ends[0])
                except (ValueError, LibraryPanic) as error:
                    raise RequestError(
                        asked.where,
                        f"this model's tokenizer follows no grammar; those can whose tokens are bytes ({error})",
                    ) from None
            return self._tokenizer


class Guide:
    """The place of one answer in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int]):
        """``ends``: the tokens that end an answer; the matcher knows the first of them."""
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._ends = ends

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped()

    def allow(self, words: Any, banned: Sequence[int] = ()) -> None:
        """Write the tokens that may come next to ``words``, a row of the sampler's mask, int32 [ceil(vocabulary / 32)].

        ``banned`` tokens are not among them, unless there is no other. Raises GenerationError if the grammar has become
        too complex to go on.
        """
        words[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._words]
        self._check()
        bits = words.view(np.uint32)
        if bits[self._ends[0] // 32] >> np.uint32(self._ends[0] % 32) & np.uint32(1):
            for token in self._ends:
                bits[token // 32] |= np.uint32(1 << token % 32)
        if banned:
            before = bits.copy()
            for token in banned:
                bits[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
            if not bits.any():
                bits[:] = before

    def take(self, token: int) -> None:
        """Go on behind ``token``. Raises GenerationError like :meth:`allow`, and for a token that was not allowed."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GenerationError(f"the answer cannot follow its grammar any further: {self._matcher.get_error()}")


def _grammar(asked: StructuredOutputs) -> str:
    """Return the constraint as a grammar in the library's notation. Raises ValueError for text that is none."""
    from llguidance import grammar_from, regex_to_lark

    if asked.form in ("json", "json_object"):
        return f"{NO_FORCING}\nstart: {json_rule(asked.schema)}"
    if asked.form == "regex":
        return f"{NO_FORCING}\nstart: /{regex_to_lark(asked.text, '')}/"
    found = grammar_from("choice" if asked.form == "choice" else "grammar", asked.text)
    return found if "%llguidance" in found else f"{NO_FORCING}\n{found}"
