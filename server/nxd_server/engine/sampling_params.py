"""How one request's tokens are sampled, checked before anything is queued.

The numbers that the graphs' sampler takes are declared in :mod:`nxd_infer.artifact.sampler_fields`. Their checks and
step inputs here, and their fields in a request's body (``http.openai.schemas``), are derived from that table.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_infer.util.options import Option
from nxd_infer.util.suggest import did_you_mean
from nxd_server.errors import RequestError
from nxd_server.text.structured_outputs import StructuredOutputs

GREEDY_BELOW = 1e-4
"""Lower temperatures mean greedy, the limit of sampling; so no subnormal number ever reaches a graph. Well above the
operator's own limit (``nxd_infer.ops.sampling``), so that both always agree."""
SMALLEST_TOP_P = 1e-6
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_BAD_CHARACTERS = 8192
MAX_STOP_LENGTH = 1024
WHOLE_NUMBERS = {
    **dict.fromkeys(("max_tokens", "min_tokens", "logprobs", "prompt_logprobs"), Option(0, "", int, minimum=0)),
    "n": Option(1, "", int, minimum=1, maximum=128),
    "seed": Option(0, "", int, minimum=-(2**63), maximum=2**63 - 1),
}
MAY_BE_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
TOKEN_ID = Option(0, "", int, minimum=0)
BIAS = Option(0.0, "Added to a token's logit.", float, minimum=-100, maximum=100)
SAMPLER_DEFAULTS: dict[str, float] = {
    **{name: field.off for name, field in SAMPLER_FIELDS.items()},
    **dict.fromkeys(("seed", "bias_ids", "adapter"), 0),
    **dict.fromkeys(("allowed", "prompt_length"), -1),
    "bias_values": 0.0,
}
"""The inputs that the engine can feed, with the value that means "off"."""


def _sampler(name: str) -> Any:
    return SAMPLER_FIELDS[name].default


T = TypeVar("T")


def _suggesting(kind: type[T]) -> type[T]:
    """Let the TypeError of an unknown name say which parameter was meant."""
    init, known = kind.__init__, [one.name for one in fields(kind)]  # pyright: ignore[reportArgumentType]

    @functools.wraps(init)
    def checked(self: T, *values: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                raise TypeError(f"{kind.__name__} has no parameter {name!r}{did_you_mean(name, known)}")
        init(self, *values, **given)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


@_suggesting
@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping parameters of one request; names and meaning as in OpenAI's API and vLLM.

    Raises :class:`RequestError` naming the field if a value is out of range, and TypeError for an unknown name.
    """

    max_tokens: int | None = 16
    """Maximum number of generated tokens; None: up to the model's maximum length. More than fits is an error. 0: the
    prompt is only read."""
    temperature: float = _sampler("temperature")
    """0 is greedy; 0 to 2."""
    top_p: float = _sampler("top_p")
    top_k: int = _sampler("top_k")
    """0 (or -1) means off."""
    min_p: float = _sampler("min_p")
    seed: int | None = None
    """None or -1: a random seed. The same seed gives the same tokens, whatever else is in the batch."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text; they are not included in it."""
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    """Whether the text has at its end what stopped it."""
    skip_special_tokens: bool = True
    """Whether the text lacks special tokens."""
    allowed_token_ids: list[int] = field(default_factory=list)
    """No other tokens are generated; none given: any."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that are not generated."""
    n: int = 1
    logprobs: int | None = None
    """None: none; 0: of the chosen token; k: also of the k most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The prompt then takes as long as an answer of so many
    tokens, less what steps of several rows save."""
    presence_penalty: float = _sampler("presence_penalty")
    frequency_penalty: float = _sampler("frequency_penalty")
    repetition_penalty: float = _sampler("repetition_penalty")
    min_tokens: int = 0
    """No end of sequence, stop token or stop string before this many tokens."""
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    cache_salt: str | None = None
    """What is in the cache is used only by requests with the same salt."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """What the answer must be. It then ends where the constraint does, before ``min_tokens`` if need be."""

    _penalised: ClassVar[bool] = False

    def __post_init__(self) -> None:
        put = object.__setattr__
        for name, one in {**WHOLE_NUMBERS, **SAMPLER_FIELDS}.items():
            if (value := getattr(self, name)) is not None or name not in MAY_BE_NONE:
                put(self, name, _number(name, value, one))
        if self.seed == -1:
            put(self, "seed", None)
        if not isinstance(self.cache_salt, str | None):
            raise RequestError("cache_salt", f"must be a string, got {self.cache_salt!r}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(name, f"must be true or false, got {getattr(self, name)!r}")
        put(self, "stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        put(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        if (length := sum(map(len, self.bad_words))) > MAX_BAD_CHARACTERS:
            raise RequestError("bad_words", f"have at most {MAX_BAD_CHARACTERS} characters together, got {length}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            put(self, name, _token_ids(name, getattr(self, name)))
        put(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.structured_outputs is not None:
            put(self, "structured_outputs", StructuredOutputs.of(self.structured_outputs))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", f"{self.min_tokens} is more than max_tokens = {self.max_tokens}")
        # Graphs compute in float32, where dividing by a subnormal number gives infinities: use the limit (greedy).
        if self.temperature < GREEDY_BELOW:
            put(self, "temperature", 0.0)
        put(self, "top_k", max(0, self.top_k))
        put(self, "top_p", max(self.top_p, SMALLEST_TOP_P))
        if self.min_p < 1e-30:
            put(self, "min_p", 0.0)
        counting = ((name, one.off) for name, one in SAMPLER_FIELDS.items() if one.uses_history)
        put(self, "_penalised", any(getattr(self, name) != off for name, off in counting))  # read at every step

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether any parameter is active whose effect depends on earlier tokens."""
        return self._penalised

    def replace(self, **changes: Any) -> SamplingParams:
        """Return a copy with these fields changed, checked again."""
        return replace(self, **changes)


def _number(name: str, value: Any, declared: Option) -> Any:
    """Return a number, of its kind. Raises RequestError that names the parameter."""
    low, high = declared.minimum, declared.maximum
    if type(value) is declared.kind and (low is None or value >= low) and (high is None or value <= high):
        return value
    if declared.kind is int and isinstance(value, float) and value.is_integer():  # as JSON may have it
        value = int(value)
    if (problem := declared.problem(value)) is not None:
        raise RequestError(name, problem)
    return declared.kind(value)


def _strings(name: str, value: Any, most: int) -> list[str]:
    strings = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(one, str) for one in strings):
        raise RequestError(name, f"must be a string or a list of strings, got {value!r}")
    if len(strings) > most:
        raise RequestError(name, f"at most {most} strings are allowed, got {len(strings)}")
    for one in strings:
        if not one:
            raise RequestError(name, "a string must not be empty")
        if len(one) > MAX_STOP_LENGTH:
            raise RequestError(name, f"a string has at most {MAX_STOP_LENGTH} characters, got {len(one)}")
    return list(dict.fromkeys(strings))


def _token_ids(name: str, value: Any) -> list[int]:
    ids = [] if value is None else value
    if not isinstance(ids, (list, tuple)):
        raise RequestError(name, f"must be a list of token ids, got {value!r}")
    if not (set(map(type, ids)) <= {int} and min(ids, default=0) >= 0):  # one by one takes long
        ids = [_number(name, token, TOKEN_ID) for token in ids]
    return list(dict.fromkeys(ids))


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RequestError("logit_bias", f"must be a mapping from token ids to numbers, got {value!r}")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, str):  # JSON has string keys only
            if not (token.isascii() and token.isdigit() and len(token) < 12):
                raise RequestError("logit_bias", f"{token[:100]!r} is not a token id")
            token = int(token)
        biases[_number("logit_bias", token, TOKEN_ID)] = _number("logit_bias", bias, BIAS)
    return biases


@dataclass(frozen=True)
class Sampler:
    """The sampler inputs of one choice, as numbers; ``banned`` ids may not occur before ``min_tokens``."""

    values: dict[str, float]
    bias: tuple[tuple[int, float], ...]
    banned: tuple[int, ...]


def sampler_of(
    params: SamplingParams, seed: int, inputs: set[str], vocab_size: int, bias_slots: int, eos: Sequence[int]
) -> Sampler:
    """Return the sampler inputs of a choice for graphs with ``inputs``. Raises RequestError if one is missing."""
    values: dict[str, float] = {name: getattr(params, name) for name in SAMPLER_FIELDS}
    for name, value in values.items():
        if name not in inputs and value != SAMPLER_DEFAULTS[name]:
            raise RequestError(name, _absent(name, name))
    values |= {"seed": seed, "top_k": min(params.top_k, vocab_size)}
    if not params.greedy and "seed" not in inputs:
        raise RequestError("temperature", _absent("seed", "sampling"))
    if params.logit_bias and not {"bias_ids", "bias_values"} <= inputs:
        raise RequestError("logit_bias", _absent("bias_ids", "logit_bias"))
    if len(params.logit_bias) > bias_slots:
        raise RequestError(
            "logit_bias", f"{len(params.logit_bias)} tokens are biased; this artifact was traced for {bias_slots}"
        )
    banned: tuple[int, ...] = ()
    if params.min_tokens > 0:
        banned = tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)}))
        if banned and "allowed" not in inputs:
            raise RequestError("min_tokens", _absent("allowed", "min_tokens"))
    for name in ("structured_outputs", "allowed_token_ids", "bad_words"):
        if getattr(params, name) and "allowed" not in inputs:
            raise RequestError(name, _absent("allowed", name))
    for name in ("logit_bias", "stop_token_ids"):  # those of allowed_token_ids are checked once for all choices
        tokens = getattr(params, name)
        if outside := [token for token in tokens if token >= vocab_size]:
            raise RequestError(name, f"token {outside[0]} is outside the vocabulary of {vocab_size}")
    return Sampler(values, tuple(params.logit_bias.items()), banned)


def _absent(name: str, what: str) -> str:
    return f"the graphs of this artifact have no input {name!r}, so {what} cannot act; trace the model again"
