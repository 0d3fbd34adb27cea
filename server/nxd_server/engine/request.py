"""A request in the engine: the events that its caller gets, a ticket, one sequence of tokens for each of its choices,
and the inbox through which the engine's thread takes it.

Each choice (``index`` 0 to n-1) has a :class:`PromptEvent` if it asked for one, any number of :class:`TokenEvent`, then
exactly one terminal event: :class:`FinishEvent` or :class:`ErrorEvent`. Nothing follows a choice's terminal event.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from nxd_server.engine.adapter_slots import Adapter
from nxd_server.engine.admission import WholeRequest
from nxd_server.engine.sampling_params import Sampler, SamplingParams
from nxd_server.errors import MaxTokensError, PromptTooLongError, RequestError
from nxd_server.text.detokenize import TextStream
from nxd_server.text.grammars import Guide
from nxd_server.text.token_rules import TokenRules
from nxd_server.text.tokenizer import Tokenizer

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Those of the prompt that an earlier request had left in the cache; None if not known yet."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """Timestamps of one choice, on ``time.monotonic``'s clock; None if it did not get that far."""

    arrived: float
    admitted: float | None
    """It got a slot: queue time ends, prefill begins."""
    first_token: float | None
    finished: float


class TokenEvent(NamedTuple):
    """One generated token."""

    index: int
    token: int
    text: str
    """Text that became final with this token: may be empty (an incomplete character, a possible stop string),
    and may belong to earlier tokens. The ``text`` of all events of a choice, joined, is its answer."""
    logprob: float
    """Log-probability of the token under the raw model distribution, before temperature and masks."""
    top: tuple[tuple[int, float], ...] = ()
    """The ``logprobs`` most likely tokens and their log-probabilities, best first; empty unless requested."""
    is_stop: bool = False
    """The token ended the answer (end of sequence or a stop token) and is not part of its text."""


class PromptEvent(NamedTuple):
    """The log-probabilities of a prompt (``SamplingParams.prompt_logprobs``)."""

    index: int
    scores: list[tuple[float, tuple[tuple[int, float], ...]]]
    """Of each token but the first: its log-probability behind those before it, and the likeliest tokens there."""


@dataclass(frozen=True)
class FinishEvent:
    """The choice is complete."""

    index: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    text: str = ""
    """Text that was held back until now, to be appended."""
    stop: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end of sequence or the length limit."""


@dataclass(frozen=True)
class ErrorEvent:
    """The choice failed with a typed error (``nxd_server.errors``). The text sent so far is incomplete."""

    index: int
    error: Exception
    usage: Usage
    timings: Timings


Event: TypeAlias = PromptEvent | TokenEvent | FinishEvent | ErrorEvent
OnEvent: TypeAlias = Callable[[Event], None]


class Ticket:
    """A request in the engine. ``cancel()`` and ``wait()`` are thread-safe."""

    def __init__(
        self,
        request_id: str,
        on_event: OnEvent,
        timeout: float | None,
        cancel: Callable[[Ticket], None],
        whole: WholeRequest | None = None,
    ):
        """``whole``: the request that this is a part of. Default: a new one."""
        self.request_id = request_id
        self.whole = whole or WholeRequest()
        self.arrived = time.monotonic()
        self.timeout = timeout
        self.on_event = on_event
        self.choices: list[Sequence] = []
        self.open = 0
        """Choices without a terminal event; the engine's thread decrements it."""
        self._cancel = cancel
        self._done = threading.Event()

    def cancel(self) -> None:
        """End the request now, with a FinishEvent "cancelled" for every unfinished choice. No effect once done."""
        if not self.done:
            self._cancel(self)

    @property
    def done(self) -> bool:
        """Whether every choice has had its terminal event."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until :attr:`done`; False after ``timeout`` seconds."""
        return self._done.wait(timeout)

    def close_one(self) -> None:
        """Record that a choice has had its terminal event."""
        self.open -= 1
        if self.open == 0:
            self._done.set()


@dataclass(eq=False, kw_only=True)
class Sequence:
    """One choice of a request: its tokens, and how many of them are in the KV cache."""

    id: int
    ticket: Ticket
    index: int
    """Of the choice in its request."""
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    work: float = 0.0
    """Tokens that it was expected to take."""
    sampler: Sampler
    text: TextStream | None = None
    guide: Guide | None = None
    """Its place in the grammar that it follows."""
    rules: TokenRules | None = None
    adapter: Adapter | None = None
    output: list[int] = field(default_factory=list)
    slot: int | None = None
    computed: int = 0
    """Tokens whose keys and values are in ``slot``."""
    reused: int = 0
    """Prompt tokens whose keys and values were in ``slot`` already."""
    cache_key: Hashable = None
    """What else these depend on."""
    admitted: float | None = None
    first_token: float | None = None
    ended: bool = False
    scores: list[tuple[float, tuple[tuple[int, float], ...]]] | None = None
    """As in :class:`PromptEvent`, so far; None if its prompt gets none."""

    @property
    def whole(self) -> WholeRequest:
        return self.ticket.whole

    @property
    def cost(self) -> int:
        return len(self.prompt)

    @property
    def remaining(self) -> int:
        """Prompt tokens that are not in the cache yet; 0 while decoding."""
        return max(0, len(self.prompt) - self.computed)

    @property
    def known(self) -> int:
        """Tokens of its prompt and its output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def guided(self) -> bool:
        """Whether what may come next depends on the tokens before it."""
        return self.guide is not None or self.rules is not None

    @property
    def goes_on(self) -> bool:
        """Whether another token may follow those that the steps in flight will give."""
        return self.computed + 2 <= len(self.prompt) + self.max_new_tokens

    @property
    def waits(self) -> bool:
        """Whether its next token is known only after the steps in flight."""
        return self.computed >= self.known

    def tokens(self, start: int, length: int) -> list[int]:
        """Return the tokens at positions ``start`` to ``start + length - 1`` of prompt and output together, as far as
        they are known."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start - prompt + length]
        if start + length <= prompt:
            return self.prompt[start : start + length]
        return (self.prompt + self.output)[start : start + length]


class Inbox:
    """Filled by callers, emptied by the engine's thread; ``lock`` is the engine's."""

    def __init__(self, lock: threading.Condition, clock: Callable[[], float]):
        """``clock`` times the requests' timeouts."""
        self.arrivals: deque[Sequence] = deque()
        self._lock = lock
        self._clock = clock
        self._cancels: deque[Ticket] = deque()
        self._deadlines: list[tuple[float, int, Ticket]] = []
        """A heap; tickets that are done are dropped when they are met, and when most of it may be."""
        self._most_deadlines = 64
        self._numbers = itertools.count()

    def put(self, ticket: Ticket) -> None:
        """Add all choices of a request; call with the lock held."""
        self.arrivals.extend(ticket.choices)
        if ticket.timeout is not None:
            if len(self._deadlines) > self._most_deadlines:
                self._deadlines = [entry for entry in self._deadlines if not entry[2].done]
                heapq.heapify(self._deadlines)
                self._most_deadlines = 2 * len(self._deadlines) + 64
            heapq.heappush(self._deadlines, (self._clock() + ticket.timeout, next(self._numbers), ticket))
        self._lock.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Request the end of a ticket's unfinished choices. Thread-safe."""
        with self._lock:
            self._cancels.append(ticket)
            self._lock.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether callers have left anything."""
        return bool(self.arrivals or self._cancels)

    @property
    def due(self) -> bool:
        """Whether :meth:`take` may return something. Needs no lock, because it only reads."""
        return bool(self.arrivals or self._cancels or self._first_is_due())

    def wait_seconds(self) -> float:
        """Seconds until the next deadline."""
        return max(0.0, self._deadlines[0][0] - self._clock()) if self._deadlines else math.inf

    def _first_is_due(self) -> bool:
        heap = self._deadlines
        return bool(heap) and (heap[0][0] <= self._clock() or heap[0][2].done)

    def take(self) -> tuple[list[Sequence], list[Ticket], list[Ticket]]:
        """Return new choices, cancelled tickets, and late tickets, each once."""
        with self._lock:
            arrivals, cancels, late = list(self.arrivals), list(self._cancels), []
            self.arrivals.clear()
            self._cancels.clear()
            while self._first_is_due():
                late.append(heapq.heappop(self._deadlines)[2])
            return arrivals, cancels, late

    def empty(self) -> list[Sequence]:
        """Return new choices and drop cancellations and deadlines, because everything is ending."""
        with self._lock:
            self._deadlines.clear()
            return self.take()[0]


_MASK = (1 << 64) - 1


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of choice ``index``: choice 0 has the request's, the others derive from it (splitmix64)."""
    if index == 0:
        return seed
    mixed = (seed + 0x9E3779B97F4A7C15 * index) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1


def eos_token_ids(metadata: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the model's configuration names, and its tokenizer's."""
    ids: list[int] = list(metadata.get("eos_token_ids") or ())
    own = None if tokenizer is None else tokenizer.eos_token_id
    if own is not None and own < int(metadata["vocab_size"]) and own not in ids:
        ids.append(own)  # a chat model's turns may end with it while its configuration names another
    return tuple(ids)


def max_new_tokens(limit: int | None, prompt_tokens: int, max_len: int, field: str = "max_tokens") -> int:
    """Return how many tokens may follow a prompt: ``limit``, or (None) all that fit. At least one always fits.

    Raises MaxTokensError naming ``field`` if more was requested than fits, PromptTooLongError if the prompt does not.
    """
    if prompt_tokens > max_len:
        raise PromptTooLongError(prompt_tokens, max_len)
    room = max(1, max_len - prompt_tokens)
    if limit is not None and limit > room:
        raise MaxTokensError(limit, prompt_tokens, max_len, field)
    return room if limit is None else limit


def check_token_ids(tokens: Tokens[int], vocab_size: int, field: str) -> list[int]:
    """Return the ids as a new list. Raises RequestError naming ``field`` if it is empty or has an unknown id."""
    ids = list(tokens)
    if not ids:
        raise RequestError(field, "has no tokens")
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(
                field, f"token ids are whole numbers from 0 to {vocab_size - 1}, got {token!r} at place {place}"
            )
    return ids


def check_prompt(
    tokens: Tokens[int], vocab_size: int, max_len: int, field: str = "prompt", *, completes: bool = True
) -> list[int]:
    """Return the prompt as a new list. Raises RequestError like :func:`check_token_ids`, and PromptTooLongError."""
    if len(tokens) > max_len:  # before each id is checked
        raise PromptTooLongError(len(tokens), max_len, field, completes=completes)
    return check_token_ids(tokens, vocab_size, field)


def truncation(asked: int | None, max_len: int, max_tokens: int | None = 0) -> int | None:
    """Return how many tokens of a text are kept, ``asked`` as ``truncate_prompt_tokens``; None for all. -1 leaves room
    for ``max_tokens``, or one.

    Raises RequestError for a number that is out of range.
    """
    if asked == -1:
        return max(1, max_len - (1 if max_tokens is None else max_tokens))
    if asked is not None and not 1 <= asked <= max_len:
        words = f"must be -1, or from 1 to this model's {max_len} tokens, got {asked}"
        raise RequestError("truncate_prompt_tokens", words)
    return asked
