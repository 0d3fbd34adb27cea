"""What the engine tells a request's caller, in order, from the engine's thread.

For every choice (``index`` 0 to n-1) there are any number of :class:`TokenEvent` and then exactly one terminal
event: :class:`FinishEvent` or :class:`ErrorEvent`. Nothing comes after a choice's terminal event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from nxd_infer.runtime.ranks.health import RankHealth

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one choice."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Timings:
    """When things happened to one choice, on ``time.monotonic``'s clock; None when it never came so far."""

    arrived: float
    admitted: float | None
    """A slot was given: queue time ends, prefill begins."""
    first_token: float | None
    finished: float


class TokenEvent(NamedTuple):
    """One generated token."""

    index: int
    token: int
    text: str
    """Text that became certain with this token: may be empty (an unfinished character, a possible stop string),
    and may belong to earlier tokens. All ``text`` of a choice joined is its answer."""
    logprob: float
    """Log-probability of the token under the raw model distribution, before temperature and masks."""
    top: tuple[tuple[int, float], ...] = ()
    """The ``logprobs`` likeliest tokens and their log-probabilities, best first; empty unless asked for."""
    is_stop: bool = False
    """The token ended the answer (end of sequence or a stop token) and is no part of its text."""


@dataclass(frozen=True)
class FinishEvent:
    """The choice is complete."""

    index: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    text: str = ""
    """Text that was held back until now (to be appended)."""
    stop: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end of sequence or a length."""


@dataclass(frozen=True)
class ErrorEvent:
    """The choice failed: a typed error (``nxd_server.errors``). What was sent of it so far is incomplete."""

    index: int
    error: Exception
    usage: Usage
    timings: Timings


Event: TypeAlias = TokenEvent | FinishEvent | ErrorEvent
OnEvent: TypeAlias = Callable[[Event], None]


@dataclass
class EngineStats:
    """Counters and gauges, as a consistent snapshot. Counters never go down."""

    state: str
    slots: int = 0
    slots_free: int = 0
    running: int = 0
    """Choices that hold a slot (prefilling or decoding), or one-shot requests inside a step."""
    waiting: int = 0
    waiting_tokens: int = 0
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Choices by how they ended: stop, length (one-shot requests: done), cancelled, error, deadline."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Requests refused at submission by reason: queue_full, unavailable, invalid."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    """Tokens that speculation guessed, and verified ..."""
    accepted_tokens: int = 0
    """... and those of them that were right; they are among ``generated_tokens``."""
    restarts: int = 0
    bucket_steps: dict[str, int] = field(default_factory=dict)
    """Executions by bucket name; warm-up and idle probes are not counted."""
    bucket_seconds: dict[str, float] = field(default_factory=dict)
    useful_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens (one-shot: rows) by bucket that belonged to a request ..."""
    padding_tokens: dict[str, int] = field(default_factory=dict)
    """... and those that filled the bucket up."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """The scheduler's present estimate of one execution, by bucket."""
    kv_usage: float = 0.0
    """Share of the cache's positions (slots x maximum length) that hold live tokens."""


@dataclass(frozen=True)
class EngineHealth:
    """Whether the engine can answer, and why not."""

    state: str
    """starting, ready, draining, recovering, failed or closed."""
    ready: bool
    """True when a request sent now would be served: state ready and no step overdue."""
    reason: str = ""
    last_step_age: float | None = None
    """Seconds since a step last completed."""
    step_running: float | None = None
    """Seconds that the step in flight has been running; None between steps."""
    error: str = ""
    """The last failure of the ranks, if any."""
    ranks: list[RankHealth] = field(default_factory=list)
    recovering_for: float | None = None
    """Seconds since the ranks began to be started again; None when they are not."""
    stage: str = ""
    """What is waited for meanwhile."""
