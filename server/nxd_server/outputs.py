"""The results of calls to ``LLM``."""

from __future__ import annotations

from dataclasses import dataclass, field

from nxd_server.engine.events import FinishReason, Usage


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities at one position of a completion, under the raw model distribution."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens, best first, as many as ``logprobs`` requested."""


@dataclass
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Every generated token, including a stop token at the end."""
    logprobs: list[TokenLogprob] | None = None
    """One entry per token, if ``logprobs`` was requested."""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """The stop string or stop token that ended the completion."""


@dataclass
class RequestOutput:
    """A prompt and its ``n`` completions."""

    prompt: str | None
    """The prompt's text; None if token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    usage: Usage
    """Number of tokens of the prompt, and of all completions together."""


@dataclass(frozen=True)
class ClassificationOutput:
    """A classifier's result for one text."""

    label: str
    """The most likely label; its index as text if the model names no labels."""
    logits: list[float]
    probabilities: list[float]
    """One per label. With a softmax they add up to 1; with a sigmoid each label is independent of the others. Empty
    for a model without probabilities, such as a regression model: its logits are its scores."""
