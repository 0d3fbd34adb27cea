"""Grammars that answers follow: which tokens may come next. The library llguidance compiles and matches them.

A :class:`Guide` belongs to one answer. Before each token it gives the sampler's mask of allowed tokens, an input of the
graphs; the sampled token moves it on. So an answer matches its grammar unless ``max_tokens`` cuts it.

Grammars come from clients, and masks are computed in the thread that serves everyone. So a grammar's size, the work for
a step, and the time for an answer are limited; whoever asks for more is refused.
"""

from __future__ import annotations

import copy
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nxd_server.errors import RequestError
from nxd_server.text.structured_outputs import StructuredOutputs
from nxd_server.text.tokenizer import LibraryPanic, Tokenizer, no_panics
from nxd_server.threads import settle

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

HEADER = '%llguidance {"no_forcing": true}'
"""Without it, where only one text can follow, the library allows just the tokens that its tokenizer makes of it; and
where that text is the name of a special token, it allows this token and then does not take it."""
LIMITS = {"step_max_items": 4000, "step_lexer_fuel": 100_000, "verbose_errors": False}
"""A step's work: below 0.1 s on a slow core."""
SECONDS, SECONDS_PER_TOKEN = 0.5, 0.005
"""Processor time that an answer's masks may take; usual ones take a hundredth of it."""
STACK = 512 << 20
"""Bytes of address space for compiling: the library recurses along references, and an overflow ends the process."""
MOST_COMPILED = 64
"""Grammars that are kept: applications use a few, over and over."""
MOST_WORDS = 500
"""Characters of an error."""


class Grammars:
    """Compiles what requests ask for, with one model's tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        """``vocab_size``: of the model; ``eos_token_ids``: the tokens that end an answer, allowed where it may end."""
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._ends = [token for token in eos_token_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | str | None = None
        """Or why there is none."""
        self._compiled: OrderedDict[tuple[str, str, bool], CompiledGrammar] = OrderedDict()

    def compiled(self, asked: StructuredOutputs) -> CompiledGrammar:
        """Return the compiled grammar. Takes up to seconds the first time.

        Raises RequestError if it is not valid, too complex, or uses what the library does not have.
        """
        key = (asked.form, asked.text, asked.disable_any_whitespace)
        with self._lock:
            if (found := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return found
        found = _on_deep_stack(lambda: self._compile(asked))
        with self._lock:
            self._compiled[key] = found
            while len(self._compiled) > MOST_COMPILED:
                self._compiled.popitem(last=False)
        return found

    def _compile(self, asked: StructuredOutputs) -> CompiledGrammar:
        try:
            from llguidance import LLMatcher, LLParserLimits
            from llguidance.gbnf_to_lark import GbnfToLarkError  # no ValueError
        except ImportError:
            raise RequestError(
                asked.where, "this server was installed without llguidance: pip install 'nxd-infer[server]'"
            ) from None
        tokenizer = self._library_tokenizer(asked)
        try:
            with no_panics():
                matcher = LLMatcher(tokenizer, _grammar(asked), log_level=0, limits=LLParserLimits(**LIMITS))
        except (ValueError, GbnfToLarkError, LibraryPanic) as error:
            raise asked.error(asked.form, _reason(str(error))) from None
        if matcher.is_error():
            raise asked.error(asked.form, _reason(matcher.get_error()))
        found = CompiledGrammar(matcher, self._vocab_size, self._ends, asked.where)
        found.guide().allow(np.empty(-(-self._vocab_size // 32), np.int32))  # whether a mask can be computed
        return found

    def _library_tokenizer(self, asked: StructuredOutputs) -> LLTokenizer:
        """Return the tokenizer in the library's form, built once: a second for 30,000 to 50,000 tokens."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build_tokenizer()
            if isinstance(self._tokenizer, str):
                raise RequestError(asked.where, self._tokenizer)
            return self._tokenizer

    def _build_tokenizer(self) -> LLTokenizer | str:
        from llguidance import LLTokenizer

        raw = self._source.raw
        size = max(self._vocab_size, raw.get_vocab_size(with_added_tokens=True))
        if not self._ends:  # the library would take token 0 for it
            return "this model names no token that ends an answer"
        try:
            with no_panics():
                return LLTokenizer(raw.to_str(), n_vocab=size, eos_token=self._ends[0])
        except (ValueError, LibraryPanic) as error:
            return f"structured outputs need a tokenizer of bytes, which this model's is not ({error})"


@dataclass(frozen=True)
class FreeText:
    """A part at an answer's beginning that no grammar constrains."""

    first: int | None
    """The token with which it may begin; None: the answer begins within it."""
    close: str
    """Its last characters."""
    text_of: Callable[[int], str]
    """The text of a token."""


class CompiledGrammar:
    """A grammar at its beginning."""

    def __init__(self, matcher: LLMatcher, *options: Any):
        """``options``: further arguments of :class:`Guide`."""
        self._matcher, self._options = matcher, options
        self._free: FreeText | None = None
        self._lock = threading.Lock()

    def behind(self, free: FreeText) -> CompiledGrammar:
        """Return the same grammar for answers that may begin with free text."""
        found = copy.copy(self)
        found._free = free
        return found

    def guide(self) -> Guide:
        """Return a guide for one answer."""
        with self._lock, no_panics():
            return Guide(self._matcher.deep_copy(), *self._options, free=self._free)


class Guide:
    """The place of one answer in its grammar. Used by one thread at a time.

    Its methods raise RequestError if the grammar has become too complex.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int], where: str, free: FreeText | None = None
    ):
        """``ends``: the tokens that end an answer; the matcher knows the first of them. ``where``: the request's field,
        for errors. ``free``: what may come before the grammar."""
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._ends = ends
        self._where = where
        self._left = SECONDS
        self._free = free
        """None once the grammar has begun."""
        self._inside = free is not None and free.first is None
        """Whether the answer is within the free text."""
        self._tail = ""
        """Its end, in which the closing characters may begin."""

    @property
    def complete(self) -> bool:
        """Whether nothing may follow but the end."""
        return not self._inside and self._matcher.is_stopped()

    def allow(self, words: Any, banned: Sequence[int] = ()) -> None:
        """Write the tokens that may come next to ``words``, a row of the sampler's mask, int32 [ceil(vocabulary / 32)].

        ``banned`` tokens are not among them, unless there is no other.
        """
        bits = words.view(np.uint32)
        if self._inside:
            words[:] = -1
            ban(bits, self._ends)
        else:
            words[:] = np.frombuffer(self._timed(self._matcher.compute_bitmask), np.int32)[: self._words]
            if bits[self._ends[0] // 32] >> np.uint32(self._ends[0] % 32) & np.uint32(1):
                _set(bits, self._ends)
            if self._free is not None and self._free.first is not None:
                _set(bits, [self._free.first])
        if banned:
            before = bits.copy()
            ban(bits, banned)
            if not bits.any():
                bits[:] = before

    def take(self, token: int) -> None:
        """Go on behind ``token``, which must have been allowed."""
        free = self._free
        if free is not None and self._inside:
            text = self._tail + free.text_of(token)
            if free.close in text:
                self._inside, self._free = False, None
            self._tail = text[-len(free.close) :]
        elif free is not None and token == free.first:
            self._inside = True
        else:
            self._free = None
            self._timed(lambda: self._matcher.consume_token(token))
            self._left += SECONDS_PER_TOKEN

    def _timed(self, work: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        with no_panics():
            found = work()
        self._left -= time.thread_time() - begun
        if self._matcher.is_error():
            raise RequestError(self._where, f"the grammar is too complex: {_reason(self._matcher.get_error())}")
        if self._left < 0:
            raise RequestError(self._where, "the grammar is too complex: it takes too long to find what may come next")
        return found


def _set(bits: Any, tokens: Sequence[int]) -> None:
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)


def ban(bits: Any, tokens: Sequence[int]) -> None:
    for token in tokens:
        bits[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def _grammar(asked: StructuredOutputs) -> str:
    """Return the constraint as a grammar in the library's notation. Raises ValueError for text that is none."""
    from llguidance import regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if asked.form in ("json", "json_object"):
        return f"{HEADER}\nstart: {asked.rule}"
    if asked.form == "regex":
        if (len(asked.text) - len(asked.text.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash")
        return f"{HEADER}\nstart: /{regex_to_lark(asked.text, '')}/"
    if asked.form == "choice":
        texts = asked.choice or ()
        return f"{HEADER}\nstart: /{'|'.join(map(_literally, texts))}/"
    own = asked.text.lstrip().startswith("%llguidance")
    found = any_to_lark(asked.text)
    return found if own else f"{HEADER}\n{found.removeprefix('%llguidance {}')}"


def _literally(text: str) -> str:
    """Return an expression that matches ``text`` alone. Raises UnicodeEncodeError for a lone surrogate."""
    text.encode()
    return "".join(char if char.isascii() and char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


def _reason(message: str) -> str:
    """Return what an error of the library says, without the places and lines of the grammar that we made."""
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^$|<non-verbose)", line)]
    text = " ".join(" ".join(lines).split())
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema: ", "", text)
    return text if len(text) <= MOST_WORDS else f"{text[:MOST_WORDS]}..."


def _on_deep_stack(work: Callable[[], CompiledGrammar]) -> CompiledGrammar:
    """Return ``work()`` of a thread with a stack of ``STACK`` bytes, of which it touches what it needs."""
    outcome: Future[CompiledGrammar] = Future()
    with _STACK_SIZE:  # it is set for all threads that start now
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=settle, args=(outcome, work), name="nxd-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return outcome.result()


_STACK_SIZE = threading.Lock()
