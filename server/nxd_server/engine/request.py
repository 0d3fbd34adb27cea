"""A request in the engine: a ticket for its caller, and one sequence of tokens for each of its choices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

from nxd_server.engine.adapter_slots import Adapter
from nxd_server.engine.admission import WholeRequest
from nxd_server.engine.events import OnEvent
from nxd_server.engine.sampling_params import Sampler, SamplingParams
from nxd_server.errors import MaxTokensError, PromptTooLongError, RequestError
from nxd_server.text.detokenize import TextStream
from nxd_server.text.grammars import Guide
from nxd_server.text.tokenizer import Tokenizer


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
    sampler: Sampler
    text: TextStream | None = None
    guide: Guide | None = None
    """Its place in the grammar that it follows."""
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

    @property
    def remaining(self) -> int:
        """Prompt tokens that are not in the cache yet; 0 while decoding."""
        return max(0, len(self.prompt) - self.computed)

    @property
    def goes_on(self) -> bool:
        """Whether another token may follow those that the steps in flight will give."""
        return self.computed + 2 <= len(self.prompt) + self.max_new_tokens

    @property
    def waits(self) -> bool:
        """Whether its next token is known only after the steps in flight."""
        return self.computed >= len(self.prompt) + len(self.output)

    def tokens(self, start: int, length: int) -> list[int]:
        """Return the tokens at positions ``start`` to ``start + length - 1`` of prompt and output together, as far as
        they are known."""
        prompt = len(self.prompt)
        if start >= prompt:
            return self.output[start - prompt : start - prompt + length]
        if start + length <= prompt:
            return self.prompt[start : start + length]
        return (self.prompt + self.output)[start : start + length]


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


def check_prompt(tokens: Tokens[int], vocab_size: int, max_len: int) -> list[int]:
    """Return the prompt as a new list. Raises RequestError like :func:`check_token_ids`, and PromptTooLongError."""
    if len(tokens) > max_len:
        raise PromptTooLongError(len(tokens), max_len)
    return check_token_ids(tokens, vocab_size, "prompt")
