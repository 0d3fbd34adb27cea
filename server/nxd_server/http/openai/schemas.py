"""Bodies of OpenAI's routes. A field's range is checked once, by the engine's SamplingParams."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model

from nxd_infer.artifact.sampler_fields import SAMPLER_FIELDS
from nxd_server.engine.sampling_params import SamplingParams
from nxd_server.http.error_responses import ApiError, clip, wrong
from nxd_server.http.request_body import (
    Body,
    Conversational,
    Fields,
    Listed,
    Neutral,
    QueuedBody,
    Texts,
    Whole,
    equals,
    is_empty,
    is_one_of,
)

MOST_STOP_TOKENS = 1024
"""They are checked at every token, in the one thread that serves everyone."""
MOST_BIASES = 4096
"""The engine checks how many a graph takes; no graph takes this many."""
MOST_MESSAGES = 4096
MOST_TEXTS = 2048
"""Prompts or inputs of a request, checked before they are looked through; OpenAI's limit."""

OF_SAMPLERS_THAT_ARE_OFF = (
    *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dynatemp_exponent", "dry_base", "dry_allowed_length"),
    *("dry_penalty_last_n", "dry_sequence_breakers"),
)
"""They tune what another field turns on, and no value of that one which does passes."""

OTHER_SERVERS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("annotations", "logits_processors"), is_empty),
    **dict.fromkeys(("mm_processor_kwargs", "kv_transfer_params", "vllm_xargs"), is_empty),
    **dict.fromkeys(("detokenize", "spaces_between_special_tokens", "separate_reasoning"), is_one_of(True)),
    **dict.fromkeys(("return_tokens_as_token_ids", "watermark", "return_hidden_states"), is_one_of(False)),
    **dict.fromkeys(("return_full_text", "decoder_input_details"), is_one_of(False)),
    **dict.fromkeys(("repeat_penalty", "encoder_repetition_penalty", "typical_p", "typical", "tfs_z"), equals(1)),
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "no_repeat_ngram_size"), equals(0)),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability"), equals(0)),
    **dict.fromkeys(("dynatemp_range", "smoothing_factor", "n_probs", "min_keep"), equals(0)),
    "min_new_tokens": equals(0),
    **dict.fromkeys(OF_SAMPLERS_THAT_ARE_OFF, lambda value: True),
}
"""Fields that clients of vLLM, SGLang, TGI and llama.cpp send by default, with the values that have no effect."""


class StreamOptions(Fields):
    include_usage: bool | None = Field(None, description="A last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the counts of a choice so far in each of its chunks."
    )
    include_obfuscation: bool | None = Field(None, description="Pad every chunk, so that sizes reveal little.")


def _sampler_fields() -> dict[str, Any]:
    """Return the sampler's numbers as fields of a body; the engine checks their limits."""
    made: dict[str, Any] = {}
    for name, field in SAMPLER_FIELDS.items():
        kind: Any = Whole if field.kind is int else field.kind
        if field.model_may_set:
            text = f"{field.help} Default: the model's own, else {field.default:g}."
            made[name] = (kind | None, Field(None, description=text))
        else:
            made[name] = (kind, Field(field.default, description=field.help))
    return made


class SamplerBody(create_model("SamplerFields", __base__=QueuedBody, **_sampler_fields())):
    """The sampler's numbers."""


class SamplingBody(SamplerBody):
    """Fields of both completions and chat."""

    NEUTRAL: ClassVar[Neutral] = {
        **OTHER_SERVERS,
        **dict.fromkeys(("store", "no_stop_trim", "use_beam_search", "early_stopping"), is_one_of(False)),
        "service_tier": is_one_of("auto", "default"),
        "length_penalty": equals(1),
    }
    INSTEAD: ClassVar[dict[str, str]] = {
        "repeat_penalty": "repetition_penalty",
        "no_stop_trim": "include_stop_str_in_output",
    }

    stream: bool = Field(False, description="Answer as server-sent events, one chunk per piece of text.")
    stream_options: StreamOptions | None = None

    n: Whole = Field(1, description="Choices per prompt.")
    max_tokens: Whole | None = Field(None, description="Most tokens to generate.")
    min_tokens: Whole = Field(0, description="No end before this many tokens.")
    seed: Whole | None = Field(None, description="The same seed gives the same answer; -1: a random one.")
    stop: Texts | None = Field(None, description="Up to 16 strings that end the text.")
    stop_token_ids: Listed[int] = Field(default_factory=list, max_length=MOST_STOP_TOKENS)
    include_stop_str_in_output: bool = Field(False, description="The text has at its end what stopped it.")
    skip_special_tokens: bool = Field(True, description="False: the text shows special tokens.")
    allowed_token_ids: Listed[int] = Field(default_factory=list, max_length=65_536, description="No other tokens come.")
    bad_words: Listed[str] = Field(default_factory=list, description="Texts that are not generated.")
    prompt_logprobs: Annotated[Whole | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        None, description="Log-probabilities of the prompt's tokens, and this many likeliest ones. Not in a stream."
    )
    return_token_ids: bool = Field(False, description="Return the token ids of the prompt and of the answer.")
    truncate_prompt_tokens: Whole | None = Field(
        None, description="Keep this many tokens at the end of a prompt; -1: as many as fit."
    )
    ignore_eos: bool = False
    logit_bias: dict[str, float] = Field(
        default_factory=dict, max_length=MOST_BIASES, description="From token id to -100 .. 100."
    )
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, or json_schema with its schema: what the answer must be."
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json (a schema), json_object, regex, choice and grammar, which the answer follows."
    )
    guided_json: Any = Field(None, description="Older name of structured_outputs.json; so are the three below.")
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    cache_prompt: bool = Field(True, description="Whether the prompt's cache may be shared with other requests.")
    cache_salt: str | None = Field(None, max_length=256, description="Share it only where this is the same.")

    @property
    def constrained(self) -> bool:
        """Whether the request says what its answer must be."""
        return self.response_format is not None or bool(self.structured_outputs) or bool(self.guided)

    @property
    def guided(self) -> dict[str, Any]:
        """What is given by the older names, as fields of ``structured_outputs``."""
        given = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        return {name: value for name, value in given.items() if value}

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise wrong("stream_options", "is only allowed when `stream` is true")

    def sampling(self, max_tokens: int | None, logprobs: int | None, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters, with ``defaults`` for what the body omits. Raises RequestError for a value
        out of range."""
        given = {name: value for name in SAMPLER_FIELDS if (value := getattr(self, name)) is not None}
        names = ("seed", "stop", "stop_token_ids", "n", "min_tokens", "ignore_eos", "include_stop_str_in_output")
        names += ("skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs", "logit_bias")
        same = {name: getattr(self, name) for name in names}
        return SamplingParams(
            **{**defaults, **given, **same},
            max_tokens=max_tokens,
            logprobs=logprobs,
            cache_salt=self.cache_salt if self.cache_prompt else secrets.token_hex(16),
        )


class CompletionBody(SamplingBody):
    """``POST /v1/completions``."""

    NEUTRAL: ClassVar[Neutral] = {**SamplingBody.NEUTRAL, "include_reasoning": is_one_of(True)}

    prompt: Any = Field(..., description="Text, a list of texts, token ids, or a list of lists of token ids.")
    suffix: str = Field("", description="Write what comes between the prompt and this, if the tokenizer can say so.")
    best_of: Whole | None = Field(None, description="Generate this many choices, and return the n likeliest.")
    echo: bool = Field(False, description="Put the prompt before the text.")
    logprobs: Whole | None = Field(None, description="Log-probabilities of the tokens and this many likeliest ones.")
    add_special_tokens: bool = Field(True, description="Put the model's special tokens around a text prompt.")


class ChatBody(SamplingBody, Conversational):
    """``POST /v1/chat/completions``."""

    HARMLESS: ClassVar[frozenset[str]] = Body.HARMLESS | {
        f"prompt_cache_{of}" for of in ("key", "options", "retention")
    }
    NEUTRAL: ClassVar[Neutral] = {
        **SamplingBody.NEUTRAL,
        **dict.fromkeys(("audio", "functions", "prediction", "moderation"), is_empty),
        **dict.fromkeys(("echo", "add_special_tokens"), is_one_of(False)),
        **dict.fromkeys(("web_search_options", "chat_template"), lambda value: False),
        "modalities": is_one_of(["text"]),
        "function_call": is_one_of("none", "auto"),
        "verbosity": is_one_of("medium"),
        "best_of": equals(1),
    }

    messages: Listed[dict[str, Any]] = Field(
        ..., max_length=MOST_MESSAGES, description="The conversation, oldest first."
    )
    max_completion_tokens: Whole | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: Whole | None = Field(None, description="Most likely tokens per position; needs logprobs.")
    tool_choice: Any = Field(
        None,
        description="auto; required or one tool: the answer is a call; none: no tools; allowed_tools: some of them.",
    )
    reasoning_effort: str | None = Field(
        None, description="For the template; if it can only turn reasoning off, then none does. Else: none."
    )
    include_reasoning: bool = Field(True, description="False: the answer has no reasoning.")
    parallel_tool_calls: bool | None = Field(None, description="False: at most one call in an answer.")


TRUNCATE = "Truncate a longer text to this many tokens; -1: to the model's limit."


class EmbeddingBody(QueuedBody):
    """``POST /v1/embeddings``."""

    NEUTRAL: ClassVar[Neutral] = {
        "annotations": is_empty,
        "store": is_one_of(False),
        "add_special_tokens": is_one_of(True),
        "embed_dtype": is_one_of("float32"),
        "endianness": is_one_of("native"),
    }

    input: Any = Field(..., description="Text, a list of texts, token ids, or a list of lists of token ids.")
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Whole | None = Field(None, description=TRUNCATE)
    prompt_name: str | None = Field(
        None, description="The model's prompt to prepend to a text; by default the model's default one."
    )
    dimensions: Whole | None = Field(
        None, description="Cut a vector to this size and normalise it again: of a Matryoshka model."
    )


class PoolingBody(EmbeddingBody):
    """``POST /pooling``."""

    task: Literal["embed", "classify", "token_classify"] | None = Field(None, description="Only what the model is for.")
    use_activation: bool = Field(True, description="False: a classifier's logits instead of probabilities.")


class ClassifyBody(QueuedBody):
    """``POST /v1/classify``."""

    NEUTRAL: ClassVar[Neutral] = EmbeddingBody.NEUTRAL

    input: Any = Field(..., description="As for embeddings, or a list of pairs of texts, each pair one input.")
    truncate_prompt_tokens: Whole | None = Field(None, description=TRUNCATE)
    use_activation: bool = Field(True, description="False: logits instead of probabilities.")
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None, description="Of a token classifier: how tokens become entities, as in transformers. Default: simple."
    )


def token_lists(value: Any, field: str) -> list[str | list[int]]:
    """Return a prompt in any of its four forms as a list of texts and token-id lists.

    Raises:
        ApiError: 400 for another form, an empty list, too many texts, or a number that cannot be an id.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong(field, "must be a string, a list of strings, or token ids")
    if not value:
        raise wrong(field, "must not be an empty list")
    if len(value) > MOST_TEXTS and not isinstance(value[0], int | float):
        raise wrong(field, f"has {len(value)} texts; one request may have {MOST_TEXTS}")
    if all(isinstance(item, str) for item in value):
        return list(value)
    if _ids(value):
        return [list(value)]
    if isinstance(value[0], int | float):
        raise _no_id(value, field)
    for i, item in enumerate(value):
        path = f"{field}[{i}]"
        if not isinstance(item, list):
            raise wrong(path, f"must be a list of token ids, as `{field}` is not a list of strings")
        if not item:
            raise wrong(path, "must not be an empty list")
        if not _ids(item):
            raise _no_id(item, path)
    return [list(item) for item in value]


def texts_or_pairs(value: Any, field: str) -> list[str | tuple[str, str] | list[int]]:
    """Like :func:`token_lists`, but also accepts a list of pairs of texts, returned as tuples."""
    if isinstance(value, list) and 0 < len(value) <= MOST_TEXTS and all(map(_is_pair, value)):
        return [(first, second) for first, second in value]
    return [*token_lists(value, field)]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _ids(value: list[Any]) -> bool:
    return not value or (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 2**31)


def _no_id(value: list[Any], path: str) -> ApiError:
    """Return the error of a list that is meant as token ids; it names the first that is none."""
    place = next(place for place, item in enumerate(value) if not _ids([item]))
    got = f", got {value[place]!r}" if isinstance(value[place], int | float) else ""
    at = f"{path}[{place}]"
    return wrong(at, f"must be a token id: a whole number from 0 to {2**31 - 1}{clip(got)}")
