"""What a request's body may hold, route by route, and how a body becomes a checked object.

A field falls in one of four kinds. *Acting* fields are declared on the model and change the answer as documented.
*Harmless* ones (``user``, ``metadata``, ...) are about bookkeeping and pass with any value. *Neutral* ones are not
acted on, so only the values that ask for nothing pass (``best_of`` 1, ``suffix`` null); another value is a 400 that
names the field. Everything else is unknown: a 400 that names it. ``null`` always means "not given".

Ranges are checked once, where they are used: :class:`~nxd_server.engine.sampling_params.SamplingParams` for sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.http.error_responses import bad_request, clip, missing_field, unknown_field, unsupported
from nxd_server.text.body_limits import MOST_BIASES

BodyT = TypeVar("BodyT", bound="Body")
MOST_STOP_TOKENS = 1024
"""They are looked through at every token, in the one thread that serves everybody."""
MOST_VARIABLES = 64

ItemT = TypeVar("ItemT")
Listed = Annotated[list[ItemT], Field(fail_fast=True)]
"""A list that ends with its first wrong element: an error for each takes seconds, and hundreds of megabytes."""


class Body(BaseModel):
    """Base of all request bodies: strict types, unknown fields refused."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "safety_identifier", "request_id"})
    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = {}
    INSTEAD: ClassVar[dict[str, str]] = {}
    """Names of other servers, and ours of the same thing."""

    @classmethod
    def parse(cls: type[BodyT], data: dict[str, Any]) -> BodyT:
        """``data`` as this body.

        Raises:
            ApiError: 400, its ``param`` the path of the first field that is wrong.
        """
        given = {}
        for name, value in data.items():
            if value is None or name in cls.HARMLESS:
                continue
            if name in cls.NEUTRAL:
                if not cls.NEUTRAL[name](value):
                    instead = cls.INSTEAD.get(name)
                    raise unsupported(name, f"use `{instead}`" if instead else "")
                continue
            if name not in cls.model_fields:
                raise unknown_field(clip(name), cls.model_fields)
            given[name] = value
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            path = field_path(first["loc"])
            if first["type"] == "missing":
                raise missing_field(path) from None
            if first["type"] == "extra_forbidden":
                raise unknown_field(path) from None
            raise bad_request(f"`{path}`: {first['msg']}{_got(first)}", param=path) from None


def _got(error: ErrorDetails) -> str:
    """What stood where a number belongs, if it is short; elsewhere it may be half a prompt."""
    value = error["input"]
    if not error["type"].startswith(("int", "float", "bool")) or not isinstance(value, (int, float, str)):
        return ""
    return f", got {value!r}" if len(str(value)) <= 40 else ""


def field_path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` -> ``messages[0].role``."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return clip(path)


def _is(*values: Any) -> Callable[[Any], bool]:
    """Accepts exactly these values (``True`` is not 1 here)."""
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _equals(number: float) -> Callable[[Any], bool]:
    return lambda value: value == number and not isinstance(value, bool)


OTHER_SERVERS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("annotations", "allowed_token_ids", "bad_words", "logits_processors"), _empty),
    **dict.fromkeys(("structured_outputs", "mm_processor_kwargs", "kv_transfer_params", "vllm_xargs"), _empty),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens"), _is(True)),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), _is(True)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids", "prompt_logprobs"), _is(False)),
    **dict.fromkeys(("watermark", "no_stop_trim"), _is(False)),
    **dict.fromkeys(("repeat_penalty", "encoder_repetition_penalty", "typical_p", "typical", "tfs_z"), _equals(1)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "no_repeat_ngram_size"), _equals(0)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability"), _equals(0)),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "priority", "n_probs", "min_keep"), _equals(0)),
}
"""What clients of vLLM, SGLang, TGI and llama.cpp send by default, with the values that ask for nothing."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = Field(None, description="A last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the counts of a choice so far in each of its chunks."
    )
    include_obfuscation: bool | None = Field(None, description="Pad every chunk, so that sizes tell little.")


_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OWN = "Default: the model's own"


class SamplingBody(Body):
    """What completions and chat share."""

    # Whether, and with whom, a prompt's cache may be shared: requests share none here.
    HARMLESS: ClassVar[frozenset[str]] = Body.HARMLESS | {"cache_prompt", "cache_salt"}
    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = {
        **OTHER_SERVERS,
        "store": _is(False),
        "response_format": _is({"type": "text"}),
        "service_tier": _is("auto", "default"),
        "skip_special_tokens": _is(True),
        "include_stop_str_in_output": _is(False),
        "use_beam_search": _is(False),
        "length_penalty": _equals(1),
        "early_stopping": _is(False),
        "guided_json": _empty,
        "guided_regex": _empty,
        "guided_choice": _empty,
        "guided_grammar": _empty,
    }
    INSTEAD: ClassVar[dict[str, str]] = {"repeat_penalty": "repetition_penalty"}

    model: str | None = Field(None, description="The served model's name, which is the default, or an adapter's.")
    stream: bool = Field(False, description="Answer as server-sent events, a chunk a piece of text.")
    stream_options: StreamOptions | None = None

    n: int = Field(1, description="Choices a prompt.")
    max_tokens: int | None = Field(None, description="Tokens to generate at most.")
    min_tokens: int = Field(0, description="No end before this many tokens.")
    temperature: float | None = Field(None, description=f"0 is greedy; up to 2. {_OWN}, else 1.")
    top_p: float | None = Field(None, description=f"{_OWN}, else 1.")
    top_k: int | None = Field(None, description=f"0 or -1: off. {_OWN}, else 0.")
    min_p: float | None = Field(None, description=f"{_OWN}, else 0.")
    seed: int | None = Field(None, description="The same seed gives the same answer.")
    stop: str | Listed[str] | None = Field(None, description="Up to 16 strings that end the text.")
    stop_token_ids: Listed[int] = Field(default_factory=list, max_length=MOST_STOP_TOKENS)
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = Field(None, description=f"{_OWN}, else 1.")
    logit_bias: dict[str, float] = Field(
        default_factory=dict, max_length=MOST_BIASES, description="From token id to -100 .. 100."
    )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise bad_request("`stream_options` is only allowed when `stream` is true", param="stream_options")

    def sampling(self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """The engine's parameters, ``defaults`` where the body says nothing; raises its RequestError for a value out of
        range."""
        given = {name: value for name in _SAMPLED if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else list(self.stop or []),
            stop_token_ids=self.stop_token_ids,
            n=self.n,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logit_bias={_token_id(token): bias for token, bias in self.logit_bias.items()},
        )


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise bad_request(f"`logit_bias`: {clip(text)!r} is not a token id", param="logit_bias")
    return int(text)


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = {**SamplingBody.NEUTRAL, "suffix": _is("")}

    prompt: Any = Field(..., description="Text, a list of texts, token ids, or a list of lists of token ids.")
    best_of: int | None = Field(None, description="Only the value of n: the best of more is not chosen here.")
    echo: bool = Field(False, description="Put the prompt before the text.")
    logprobs: int | None = Field(None, description="Log-probabilities of the tokens and of this many likeliest ones.")
    add_special_tokens: bool = Field(True, description="Put the model's special tokens around a text prompt.")


class ChatBody(SamplingBody):
    """``POST /v1/chat/completions``."""

    HARMLESS: ClassVar[frozenset[str]] = SamplingBody.HARMLESS | {
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = {
        **SamplingBody.NEUTRAL,
        "audio": _empty,
        "modalities": _is(["text"]),
        "tools": _empty,
        "tool_choice": _is("none", "auto"),
        "functions": _empty,
        "function_call": _is("none", "auto"),
        "prediction": _empty,
        "moderation": _empty,
        "reasoning_effort": _is("none"),
        "verbosity": _is("medium"),
        "web_search_options": lambda value: False,
        "continue_final_message": _is(False),
        "add_generation_prompt": _is(True),
        "chat_template": lambda value: False,
        "documents": _empty,
        "echo": _is(False),
        "add_special_tokens": _is(False),
        "best_of": _equals(1),
    }

    messages: Listed[dict[str, Any]] = Field(..., description="The conversation, oldest first.")
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, description="Likeliest tokens at each position; needs logprobs.")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, max_length=MOST_VARIABLES, description="Variables for the template."
    )


_TRUNCATE = "Cut a longer text to as many tokens; -1: to what the model takes."


class EmbeddingBody(Body):
    """``POST /v1/embeddings``."""

    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = {"priority": _equals(0), "add_special_tokens": _is(True)}

    input: Any = Field(..., description="Text, a list of texts, token ids, or a list of lists of token ids.")
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: int | None = Field(None, description=_TRUNCATE)
    prompt_name: str | None = Field(
        None, description="Which of the model's prompts to put in front of a text; by default the model's default one."
    )
    dimensions: int | None = Field(None, description="Only the model's own size.")


class ClassifyBody(Body):
    """``POST /v1/classify``."""

    NEUTRAL: ClassVar[dict[str, Callable[[Any], bool]]] = EmbeddingBody.NEUTRAL

    input: Any = Field(..., description="As for embeddings, or a list of pairs of texts, each pair one input.")
    model: str | None = None
    truncate_prompt_tokens: int | None = Field(None, description=_TRUNCATE)


class PredictBody(Body):
    """``POST /v1/predict``."""

    inputs: dict[str, Any] | None = Field(
        None, description='Tensors by name: nested lists, or {"data": nested or flat list, "dtype", "shape"}.'
    )
    safetensors: str | None = Field(None, description="The inputs as one base64 safetensors file, instead.")
    model: str | None = None
    output_format: Literal["json", "safetensors"] | None = Field(
        None, description="How the outputs come back; by default as the inputs came."
    )
    outputs: Listed[str] | None = Field(None, description="Names of the outputs wanted; all when absent.")


class AdapterBody(Body):
    """``POST /v1/adapters``."""

    name: str = Field(..., description="What requests give as `model`.")
    path: str = Field(..., description="The adapter's directory, under the server's weights_root.")


class WeightsBody(Body):
    """``POST /v1/weights``."""

    path: str = Field(..., description="A folder of checkpoints, or safetensors, under the server's weights_root.")
    tag: str | None = Field(None, description="Which checkpoint of the folder; by default the newest complete one.")
    timeout: float | None = Field(
        None, gt=0, le=86400, description="Seconds running requests may take to finish; weights_drain_timeout if null."
    )


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Listed[int]


def token_lists(value: Any, field: str) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list of texts and token-id lists.

    Raises:
        ApiError: 400 for another form, an empty list, or a negative id.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise bad_request(f"`{field}` must be a string, a list of strings, or token ids", param=field)
    _not_empty(value, field)
    if all(isinstance(item, str) for item in value):
        return list(value)
    if _ids(value):
        return [list(value)]
    for i, item in enumerate(value):
        path = f"{field}[{i}]"
        if not isinstance(item, list) or not _ids(item):
            raise bad_request(
                f"`{path}` must be a list of token ids, as `{field}` is not a list of strings", param=path
            )
        _not_empty(item, path)
    return [list(item) for item in value]


def texts_or_pairs(value: Any, field: str) -> list[str | tuple[str, str] | list[int]]:
    """As :func:`token_lists`, or a list of pairs of texts, as tuples."""
    if isinstance(value, list) and value and all(map(_is_pair, value)):
        return [(first, second) for first, second in value]
    return [*token_lists(value, field)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _not_empty(value: list[Any], path: str) -> None:
    if not value:
        raise bad_request(f"`{path}` must not be an empty list", param=path)


def _ids(value: list[Any]) -> bool:
    return not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31)
