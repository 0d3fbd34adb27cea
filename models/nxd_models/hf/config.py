"""Reading a Hugging Face ``config.json`` without transformers, and refusing by name what cannot be run exactly.

Both spellings of RoPE are read: ``rope_theta`` + ``rope_scaling`` (transformers 4) and ``rope_parameters``
(transformers 5). Dropout rates are ignored: these models train without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nxd_infer.errors import ModelConfigError

DECODER_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ENCODER_TYPES = ("bert", "roberta")
ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
SCORES = ("sigmoid", "softmax", "none")
ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "tanh")
_ACTIVATION_ALIASES = {"swish": "silu", "gelu_python": "gelu", "gelu_fast": "gelu_pytorch_tanh"}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: ``type`` is one of :data:`ROPE_TYPES`; the other fields as documented there."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """``llama3``: the context of the pre-training. ``dynamic``: the length up to which nothing is scaled."""


@dataclass(frozen=True)
class DecoderConfig:
    """A causal language model of the Llama family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    norm_eps: float = 1e-6
    activation: str = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each query and key head (Qwen3)."""
    tied: bool = False
    """The output head is the transposed embedding."""
    sliding_window: int | None = None
    """Up to this length full attention computes the same; longer contexts are refused (see ``max_length``)."""
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    @property
    def max_length(self) -> int:
        """The longest context in tokens that is computed exactly as the model was made."""
        longest = self.max_position
        if self.rope.type == "dynamic":
            longest = int(longest * self.rope.factor)
        return min(longest, self.sliding_window or longest)

    def check_length(self, length: int) -> None:
        """Raise ModelConfigError naming the field that limits the context when ``length`` is beyond it."""
        if length <= self.max_length:
            return
        if self.sliding_window and self.sliding_window < length:
            raise ModelConfigError(
                f"a context of {length} tokens is beyond sliding_window = {self.sliding_window}: sliding window "
                f"attention is not supported; use at most {self.max_length} tokens, where both compute the same"
            )
        raise ModelConfigError(
            f"a context of {length} tokens is beyond max_position_embeddings = {self.max_position}"
            f" (RoPE type {self.rope.type}); use at most {self.max_length} tokens"
        )


@dataclass(frozen=True)
class EncoderConfig:
    """A bidirectional encoder of the BERT family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position: int
    """Rows of the position table."""
    type_vocab_size: int = 2
    norm_eps: float = 1e-12
    activation: str = "gelu"
    pad_token_id: int = 0
    labels: tuple[str, ...] = ()
    scores: str = "softmax"
    """What makes a classifier's logits its answer: one of :data:`SCORES`."""
    initializer_range: float = 0.02
    dtype: str = "float32"

    @property
    def position_offset(self) -> int:
        """Row of the first token's position: RoBERTa counts from ``pad_token_id + 1``."""
        return self.pad_token_id + 1 if self.model_type == "roberta" else 0

    @property
    def max_length(self) -> int:
        """The longest input in tokens."""
        return self.max_position - self.position_offset


class Fields:
    """``config.json`` with errors that name the field, what it held and what is possible."""

    def __init__(self, raw: Mapping[str, Any], origin: str):
        self.raw = raw
        self.origin = origin

    def error(self, name: str, problem: str) -> ModelConfigError:
        return ModelConfigError(f"{self.origin}: {name} = {self.raw.get(name)!r}: {problem}")

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelConfigError(f"{self.origin}: the field {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"expected a whole number of at least {minimum}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.error(name, "expected a number above 0")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "expected true or false")
        return value

    def activation(self, *names: str, default: str) -> str:
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            value = _ACTIVATION_ALIASES.get(value, value) if isinstance(value, str) else value
            if value not in ACTIVATIONS:
                raise self.error(name, f"this activation is not supported; known are {', '.join(ACTIVATIONS)}")
            return value
        return default

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; null is an empty one."""
        value = self.raw.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "expected a list of texts")
        return tuple(value)

    def refuse(self, name: str, why: str) -> None:
        """Raise when the field holds anything but null, false, 0 or an empty list."""
        if self.raw.get(name):
            raise self.error(name, why)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelConfigError when it is missing, not JSON or not an object."""
    value = parse_json(path)
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def parse_json(path: Path) -> Any:
    """What a JSON file of a model directory holds. Raises ModelConfigError when it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(
            f"{path} is missing: expected a Hugging Face model directory (one of the hub is fetched with `hf download`)"
        ) from None
    except NotADirectoryError:
        raise ModelConfigError(f"{path.parent} is not a directory: expected a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON: {error}") from None


def parse_config(raw: Mapping[str, Any], origin: str = "config.json") -> DecoderConfig | EncoderConfig:
    """The configuration of a family we define. Raises ModelConfigError naming the field otherwise."""
    fields = Fields(raw, origin)
    model_type = raw.get("model_type")
    if fields.raw.get("quantization_config"):
        raise fields.error("quantization_config", "quantised weights are not read; use the unquantised model")
    if model_type in DECODER_TYPES:
        return _decoder(fields, str(model_type))
    if model_type in ENCODER_TYPES:
        return _encoder(fields, str(model_type))
    known = ", ".join(DECODER_TYPES + ENCODER_TYPES)
    raise fields.error("model_type", f"this architecture is not defined here; known are {known}")


def _decoder(f: Fields, model_type: str) -> DecoderConfig:
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        f.refuse(name, "mixture-of-experts models are not supported")
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    kv_heads = f.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"does not divide the {heads} attention heads")
    if f.raw.get("head_dim") is None and hidden % heads:
        raise f.error("hidden_size", f"does not divide over {heads} heads, and head_dim is not given")
    # Qwen3's default head_dim is 128 whatever the hidden size; the others derive it.
    head_dim = f.integer("head_dim", 128 if model_type == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise f.error("head_dim", "rotary embeddings need an even head dimension")
    max_position = f.integer("max_position_embeddings", 32768 if model_type.startswith("qwen") else 2048)
    attention_bias = f.flag("attention_bias") if model_type in ("llama", "qwen3") else False
    return DecoderConfig(
        model_type=model_type,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=f.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rope=_rope(f, max_position),
        norm_eps=f.number("rms_norm_eps", 1e-6),
        activation=f.activation("hidden_act", default="silu"),
        qkv_bias=True if model_type == "qwen2" else attention_bias,
        output_bias=False if model_type == "qwen2" else attention_bias,
        mlp_bias=f.flag("mlp_bias") if model_type == "llama" else False,
        qk_norm=model_type == "qwen3",
        tied=f.flag("tie_word_embeddings"),
        sliding_window=_sliding_window(f, model_type),
        initializer_range=f.number("initializer_range", 0.02),
        bos_token_id=_bos(f),
        eos_token_ids=eos_token_ids(f),
        dtype=_dtype(f),
    )


def _sliding_window(f: Fields, model_type: str) -> int | None:
    layer_types = f.texts("layer_types")
    if "chunked_attention" in layer_types or "linear_attention" in layer_types:
        raise f.error("layer_types", "only full attention is supported")
    if model_type.startswith("qwen"):
        return f.integer("sliding_window", 4096) if f.flag("use_sliding_window") else None
    if model_type == "mistral" and "sliding_window" not in f.raw:
        return 4096  # what the reference assumes when the field is absent; null switches it off
    return f.integer("sliding_window") if f.raw.get("sliding_window") is not None else None


def _rope(f: Fields, max_position: int) -> RopeConfig:
    parameters = f.raw.get("rope_parameters")
    name = "rope_parameters" if parameters else "rope_scaling"
    scaling = parameters or f.raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise f.error(name, "expected an object")
    r = Fields(scaling, f"{f.origin}: {name}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise f.error(name, f"the RoPE type {kind!r} is not supported; known are {', '.join(ROPE_TYPES)}")
    partial = scaling.get("partial_rotary_factor", f.raw.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelConfigError(f"{f.origin}: partial_rotary_factor = {partial!r}: only 1.0 is supported")
    theta = r.number("rope_theta", f.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in scaling:
        raise f.error(name, f"the RoPE type {kind!r} needs a factor")
    factor = r.number("factor", 1.0)
    if kind == "linear":
        return RopeConfig("linear", theta, factor)
    if kind == "dynamic":
        return RopeConfig("dynamic", theta, factor, original_max_position=max_position)
    original = r.integer("original_max_position_embeddings", max_position)
    return RopeConfig(
        "llama3", theta, factor, r.number("low_freq_factor", 1.0), r.number("high_freq_factor", 4.0), original
    )


def _encoder(f: Fields, model_type: str) -> EncoderConfig:
    kind = f.raw.get("position_embedding_type", "absolute")
    if kind != "absolute":
        raise f.error("position_embedding_type", "only absolute positions are supported")
    f.refuse("is_decoder", "only encoders are supported in this family")
    f.refuse("add_cross_attention", "only encoders are supported in this family")
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    if hidden % heads:
        raise f.error("hidden_size", f"does not divide over {heads} heads")
    labels = _labels(f)
    return EncoderConfig(
        model_type=model_type,
        vocab_size=f.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=f.integer("intermediate_size"),
        num_layers=f.integer("num_hidden_layers"),
        num_heads=heads,
        max_position=f.integer("max_position_embeddings"),
        type_vocab_size=f.integer("type_vocab_size", 2),
        norm_eps=f.number("layer_norm_eps", 1e-12),
        activation=f.activation("hidden_act", default="gelu"),
        pad_token_id=f.integer("pad_token_id", 1 if model_type == "roberta" else 0, minimum=0),
        labels=labels,
        scores=_scores(f, len(labels)),
        initializer_range=f.number("initializer_range", 0.02),
        dtype=_dtype(f),
    )


def _labels(f: Fields) -> tuple[str, ...]:
    names = f.raw.get("id2label")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(f.integer("num_labels", 2)))
    if not isinstance(names, Mapping):
        raise f.error("id2label", "expected an object from number to name")
    try:
        ordered = {int(key): str(value) for key, value in names.items()}
    except ValueError:
        raise f.error("id2label", "expected an object from number to name") from None
    if sorted(ordered) != list(range(len(ordered))):
        raise f.error("id2label", "the numbers must be 0, 1, 2, ... without a gap")
    return tuple(ordered[i] for i in range(len(ordered)))


_TORCH_SCORES = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def _scores(f: Fields, labels: int) -> str:
    """As sentence-transformers, where it wrote an activation into the file, else as transformers' pipeline does."""
    problem = f.raw.get("problem_type")
    if problem is not None and problem not in _PROBLEMS:
        raise f.error("problem_type", f"expected one of {', '.join(_PROBLEMS)}")
    theirs = f.raw.get("sentence_transformers")
    named = theirs.get("activation_fn") if isinstance(theirs, Mapping) else None
    name = named or f.raw.get("sbert_ce_default_activation_function")  # its older spelling
    if isinstance(name, str) and name.startswith("torch."):  # code of the user's own is not run
        found = _TORCH_SCORES.get(name.rpartition(".")[2])
        if found is None:
            raise ModelConfigError(
                f"{f.origin}: activation_fn = {name!r} is not supported; known are {', '.join(_TORCH_SCORES)}"
            )
        return found
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"


def _bos(f: Fields) -> int | None:
    value = f.raw.get("bos_token_id")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def eos_token_ids(f: Fields) -> tuple[int, ...]:
    """The ids that end a sequence: ``eos_token_id``, one or a list."""
    value = f.raw.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise f.error("eos_token_id", "expected a token id or a list of them")
    return tuple(values)


def _dtype(f: Fields) -> str:
    value = f.raw.get("dtype") or f.raw.get("torch_dtype") or "float32"
    value = str(value).removeprefix("torch.")
    return value if value in ("float32", "bfloat16", "float16", "float64") else "float32"
