"""What calls of ``LLM`` return."""

from __future__ import annotations

from dataclasses import dataclass, field

from nxd_server.engine.events import FinishReason, Usage


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one place of an answer, under the raw model distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, best first, as many as ``logprobs`` asked for."""


@dataclass
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every generated token, a stop token at the end included."""
    logprobs: list[TokenLogprob] | None = None
    """One entry a token, when ``logprobs`` was asked for."""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended it."""


@dataclass
class RequestOutput:
    """A prompt and its ``n`` answers."""

    prompt: str | None
    """The prompt's text; None where token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    """Tokens of the prompt, and of all answers together."""


@dataclass(frozen=True)
class ClassificationOutput:
    """A classifier's verdict on one text."""

    label: str
    """The likeliest label; its number as text where the model names none."""
    logits: list[float]
    probabilities: list[float]
    """Of one label, or of several that may hold together: each for itself (sigmoid). Else they add up to 1 (softmax).
    Empty for a model without any, as one for regression: its logits are its scores."""
