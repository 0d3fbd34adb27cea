"""How one request wants its tokens chosen, checked before anything is queued.

A number that the graphs' sampler takes is written here alone, as a field of :class:`SamplingParams` made by
``_sampler``: its check, its field in a request's body (``http.openai.schemas``) and its input of a step
(``core.step_inputs``) are made of that. The graphs must have an input of its name (``nxd_models``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from nxd_server.errors import RequestError

GREEDY_BELOW = 1e-4
"""A temperature under this is greedy: its limit, and no subnormal number ever reaches a graph."""
SMALLEST_TOP_P = 1e-6
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_N = 128


@dataclass(frozen=True)
class SamplerField:
    """A number that the graphs' sampler takes for every row."""

    off: float
    """With it the sampler does nothing of this kind: rows without a request hold it, and graphs may lack the input."""
    low: float
    high: float | None
    whole: bool
    own: bool
    """Where a request does not say, the model's ``generation_config.json`` may."""
    counts: bool
    """What it does hangs on the tokens before: guesses cannot be verified with it."""
    says: str
    """For the documentation of a request's field."""

    def checked(self, name: str, value: Any) -> float:
        """``value`` as a number; RequestError naming the field when it is none, or outside the limits."""
        if self.whole:
            return _whole(name, value, int(self.low), None if self.high is None else int(self.high))
        return _number(name, value, self.low, math.inf if self.high is None else self.high)


def _sampler(
    default: float,
    *,
    off: float,
    low: float,
    high: float | None,
    whole: bool = False,
    own: bool = True,
    counts: bool = False,
    says: str = "",
) -> Any:
    return field(default=default, metadata={"sampler": SamplerField(off, low, high, whole, own, counts, says)})


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request; names and meaning as in OpenAI's API and vLLM.

    Raises :class:`RequestError` naming the field when a value is out of its range.
    """

    max_tokens: int | None = 16
    """Tokens to generate at most; None means up to the model's maximum length. More than fits is refused."""
    temperature: float = _sampler(1.0, off=0.0, low=0.0, high=2.0, says="0 is greedy; up to 2.")
    """0 is greedy; 0 to 2."""
    top_p: float = _sampler(1.0, off=1.0, low=0.0, high=1.0)
    top_k: int = _sampler(0, off=0, low=-1, high=None, whole=True, says="0 or -1: off.")
    """0 (or -1) means off."""
    min_p: float = _sampler(0.0, off=0.0, low=0.0, high=1.0)
    seed: int | None = None
    """None draws a random one. The same seed gives the same tokens whatever else is in the batch."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text; they are not part of it."""
    stop_token_ids: list[int] = field(default_factory=list)
    n: int = 1
    logprobs: int | None = None
    """None: none; 0: of the chosen token; k: of the k likeliest too."""
    presence_penalty: float = _sampler(0.0, off=0.0, low=-2.0, high=2.0, own=False, counts=True)
    frequency_penalty: float = _sampler(0.0, off=0.0, low=-2.0, high=2.0, own=False, counts=True)
    repetition_penalty: float = _sampler(1.0, off=1.0, low=0.01, high=10.0, counts=True)
    min_tokens: int = 0
    """No end of sequence, stop token or stop string before this many tokens."""
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)

    _penalised: ClassVar[bool] = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.max_tokens is not None:
            put(self, "max_tokens", _whole("max_tokens", self.max_tokens, 1, None))
        for name, sampler in SAMPLER_FIELDS.items():
            put(self, name, sampler.checked(name, getattr(self, name)))
        put(self, "n", _whole("n", self.n, 1, MAX_N))
        put(self, "min_tokens", _whole("min_tokens", self.min_tokens, 0, None))
        if self.seed is not None:
            put(self, "seed", _whole("seed", self.seed, -(2**63), 2**63 - 1))
        if self.logprobs is not None:
            put(self, "logprobs", _whole("logprobs", self.logprobs, 0, None))
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos", f"must be true or false, got {self.ignore_eos!r}")
        put(self, "stop", _stop_strings(self.stop))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens = {self.max_tokens}")
        # Graphs compute in float32, where a subnormal divisor makes infinities: use the limit's own meaning instead.
        if self.temperature < GREEDY_BELOW:
            put(self, "temperature", 0.0)
        put(self, "top_k", max(0, self.top_k))
        put(self, "top_p", max(self.top_p, SMALLEST_TOP_P))
        if self.min_p < 1e-30:
            put(self, "min_p", 0.0)
        counting = ((name, one.off) for name, one in SAMPLER_FIELDS.items() if one.counts)
        put(self, "_penalised", any(getattr(self, name) != off for name, off in counting))  # asked for at every step

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether anything acts that hangs on the tokens before."""
        return self._penalised

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with these fields changed, checked again."""
        return replace(self, **changes)


SAMPLER_FIELDS: dict[str, SamplerField] = {
    one.name: one.metadata["sampler"] for one in fields(SamplingParams) if "sampler" in one.metadata
}
"""By the name of the parameter, of the field of a request's body and of the graphs' input."""


def _whole(name: str, value: Any, low: int, high: int | None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        if not (isinstance(value, float) and value.is_integer()):
            raise RequestError(name, f"must be a whole number, got {value!r}")
        value = int(value)
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(name, f"must be {limits}, got {value}")
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(name, f"must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        raise RequestError(name, f"must be from {low:g} to {high:g}, got {value!r}")
    return number


def _stop_strings(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError("stop", f"must be a string or a list of strings, got {value!r}")
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError("stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise RequestError("stop", "a stop string must not be empty")
        if len(stop) > MAX_STOP_LENGTH:
            raise RequestError("stop", f"a stop string has at most {MAX_STOP_LENGTH} characters, got {len(stop)}")
    return list(dict.fromkeys(stops))


def _token_ids(name: str, value: Any) -> list[int]:
    ids = [] if value is None else value
    if not isinstance(ids, (list, tuple)):
        raise RequestError(name, f"must be a list of token ids, got {value!r}")
    return [_whole(name, token, 0, None) for token in ids]


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("logit_bias", f"must be a mapping from token ids to numbers, got {value!r}")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, str) and token.strip().isdecimal() and len(token) < 20:  # JSON has string keys only
            token = int(token)
        biases[_whole("logit_bias", token, 0, None)] = _number("logit_bias", bias, -100.0, 100.0)
    return biases
