"""What is known of a model of transformers from its configuration, which transformers reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_infer.errors import MissingPackageError, ModelConfigError
from nxd_models.spec import DecoderConfig, EncoderConfig

AUTO = {
    "generate": "CAUSAL_LM",
    "classify": "SEQUENCE_CLASSIFICATION",
    "token-classification": "TOKEN_CLASSIFICATION",
    "question-answering": "QUESTION_ANSWERING",
    "fill-mask": "MASKED_LM",
}
"""By task, transformers' list of the classes that can do it: what an architecture can do is what they say."""


@dataclass(frozen=True, kw_only=True)
class GenericDecoderConfig(DecoderConfig):
    """``raw`` is the content of ``config.json``, which transformers reads."""

    why_whole: str = ""
    """Why each step reads the whole text; "" if a cache holds what the model keeps."""

    raw: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class GenericEncoderConfig(EncoderConfig):
    """``raw`` is the content of ``config.json``, which transformers reads."""

    raw: Mapping[str, Any] = field(repr=False)


def library() -> Any:
    """Return transformers. Raises MissingPackageError if it is not installed or older than its mask interface."""
    try:
        import transformers  # optional: transformers
        from transformers import AttentionInterface, AttentionMaskInterface  # noqa: F401  # optional: transformers
    except ImportError as error:
        raise MissingPackageError(
            f"a model without a family of ours runs in transformers 4.56 or later ({error}): "
            "pip install 'nxd-infer[hf]'"
        ) from error
    return transformers


def transformers_config(raw: Mapping[str, Any], origin: str = "config.json") -> Any:
    """Return transformers' own configuration. Raises ModelConfigError with its reason if it cannot read the fields."""
    kind = raw.get("model_type")
    fields = {name: _plain(value) for name, value in raw.items() if name != "model_type"}
    hf = library()
    if kind == "mistral" and "layer_types" in raw:
        kind = "ministral"  # as transformers does when it reads a directory
    try:
        return hf.AutoConfig.for_model(kind, **fields)
    except Exception as error:  # of many types, one of them huggingface_hub's
        reason = " ".join(str(error).split())
        raise ModelConfigError(f"{origin}: transformers cannot read this {kind} model: {reason}") from error


def _plain(value: Any) -> Any:
    """Return a value of ``config.json`` with infinite numbers, which transformers writes as objects."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return float(value["__float__"]) if "__float__" in value else {k: _plain(v) for k, v in value.items()}
    return value


def architectures_for(task: str, model_type: str) -> tuple[str, ...]:
    """Return the architectures that do a task, by transformers' own list."""
    listed = getattr(library().models.auto.modeling_auto, f"MODEL_FOR_{AUTO[task]}_MAPPING_NAMES")
    found = listed.get(model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)
