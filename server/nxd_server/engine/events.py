"""The events that the engine's thread sends to a request's caller, in order.

Each choice (``index`` 0 to n-1) has any number of :class:`TokenEvent`, then exactly one terminal event:
:class:`FinishEvent` or :class:`ErrorEvent`. Nothing follows a choice's terminal event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from nxd_infer.runtime.ranks import RankHealth

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


Event: TypeAlias = TokenEvent | FinishEvent | ErrorEvent
OnEvent: TypeAlias = Callable[[Event], None]


@dataclass
class EngineStats:
    """A consistent snapshot of counters and gauges. Counters never decrease."""

    state: str
    slots: int = 0
    slots_free: int = 0
    running: int = 0
    """Choices that hold a slot (prefilling or decoding), or one-shot requests in the running step."""
    waiting: int = 0
    waiting_tokens: int = 0
    submitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Choices by outcome: stop, length (one-shot requests: done), cancelled, error, deadline."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Requests rejected at submission, by reason: queue_full, unavailable, invalid."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Those that an earlier request had left in the cache."""
    generated_tokens: int = 0
    draft_tokens: int = 0
    """Tokens that were guessed and verified ..."""
    accepted_tokens: int = 0
    """... and those accepted, which are included in ``generated_tokens``."""
    restarts: int = 0
    bucket_steps: dict[str, int] = field(default_factory=dict)
    """Executions by bucket name, without warm-up and idle probes."""
    bucket_seconds: dict[str, float] = field(default_factory=dict)
    useful_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens (one-shot: rows) of requests, by bucket ..."""
    padding_tokens: dict[str, int] = field(default_factory=dict)
    """... and of padding."""
    step_seconds: dict[str, float] = field(default_factory=dict)
    """The scheduler's current estimate of one execution, by bucket."""
    kv_usage: float = 0.0
    """Fraction of the cache's positions (slots x maximum length) that hold live tokens."""


@dataclass(frozen=True)
class EngineHealth:
    """Whether the engine can answer, and if not, why."""

    state: str
    """starting, ready, draining, recovering, failed or closed."""
    ready: bool
    """True when a request sent now would be served: state ready and no step overdue."""
    reason: str = ""
    last_step_age: float | None = None
    """Seconds since a step last completed."""
    step_running: float | None = None
    """Seconds since the step in flight began; None between steps."""
    error: str = ""
    """The last failure of the ranks, if any."""
    ranks: list[RankHealth] = field(default_factory=list)
    recovering_for: float | None = None
    """Seconds since the restart of the ranks began; None if there is none."""
    stage: str = ""
    """What the restart is waiting for."""
