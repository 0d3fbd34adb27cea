"""A request in the engine: a ticket for its caller, and the choices that the engine works on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from typing import Any

from nxd_server.engine.adapter_slots import Adapter
from nxd_server.engine.core.sequence import Sequence
from nxd_server.engine.core.step_inputs import Sampler
from nxd_server.engine.events import OnEvent
from nxd_server.engine.weight_gate import WholeRequest
from nxd_server.errors import MaxTokensError, PromptTooLongError, RequestError
from nxd_server.text.detokenize import TextStream
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
        self.choices: list[Choice] = []
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
class Choice(Sequence):
    """A sequence with the engine's own data about it."""

    ticket: Ticket
    index: int
    sampler: Sampler
    text: TextStream | None
    adapter: Adapter | None = None
    admitted: float | None = None
    first_token: float | None = None
    ended: bool = False


def eos_token_ids(metadata: Mapping[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the tokens that end an answer: those that the model's configuration names, and its tokenizer's."""
    ids: list[int] = list(metadata.get("eos_token_ids") or ())
    own = None if tokenizer is None else tokenizer.eos_token_id
    if own is not None and own < int(metadata["vocab_size"]) and own not in ids:
        ids.append(own)  # a chat model's turns may end with it while its configuration names another
    return tuple(ids)


def max_new_tokens(asked: int | None, prompt_tokens: int, max_len: int, field: str = "max_tokens") -> int:
    """Return how many tokens may follow a prompt: ``asked``, or (None) all that fit. At least one always fits.

    Raises MaxTokensError naming ``field`` if more was requested than fits, PromptTooLongError if the prompt does not.
    """
    if prompt_tokens > max_len:
        raise PromptTooLongError(prompt_tokens, max_len)
    room = max(1, max_len - prompt_tokens)
    if asked is not None and asked > room:
        raise MaxTokensError(asked, prompt_tokens, max_len, field)
    return room if asked is None else asked


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
