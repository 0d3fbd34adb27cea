"""Read the configuration of any model of transformers; refuse by name what one step over a cache cannot compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxd_infer.distributed.model_plan import Heads
from nxd_infer.distributed.plan_registry import plan_for
from nxd_infer.errors import MissingPackageError, ModelConfigError
from nxd_models.hf.config_file import ClassifierFile
from nxd_models.spec import DecoderConfig, EncoderConfig

GENERATES = ("ForCausalLM", "LMHeadModel")
"""What the names of causal language models end with."""
CLASSIFIES = "ForSequenceClassification"
_OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet")
"""Types whose first position is the one after the padding token's."""


@dataclass(frozen=True, kw_only=True)
class GenericDecoderConfig(DecoderConfig):
    """``raw`` is the content of ``config.json``, which transformers reads."""

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
    fields = {name: value for name, value in raw.items() if name != "model_type"}
    hf = library()
    if kind == "mistral" and "layer_types" in raw:
        kind = "ministral"  # as transformers does when it reads a directory
    try:
        return hf.AutoConfig.for_model(kind, **fields)
    except Exception as error:  # of many types, one of them huggingface_hub's
        reason = " ".join(str(error).split())
        raise ModelConfigError(f"{origin}: transformers cannot read this {kind} model: {reason}") from error


def read_config(raw: Mapping[str, Any], origin: str) -> DecoderConfig | EncoderConfig:
    """A directory whose ``architectures`` generate is a decoder, any other an encoder.

    Raises ModelConfigError naming what neither step can compute.
    """
    file = ClassifierFile.read(raw, origin)
    config = transformers_config(raw, origin)
    plan_for(config)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelConfigError(
            f"{origin}: model_type = {file.model_type!r}: encoder-decoder models are not served in transformers' own "
            "module; without model_impl, t5 is served in ours"
        )
    if any(name.endswith(GENERATES) for name in file.architectures):
        return _decoder(config, file, raw, origin)
    return _encoder(config, file, raw)


def _decoder(config: Any, file: ClassifierFile, raw: Mapping[str, Any], origin: str) -> GenericDecoderConfig:
    heads = Heads.of(config, 1)
    end = config.eos_token_id
    return GenericDecoderConfig(
        model_type=file.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads.placed.heads,
        num_kv_heads=heads.placed.kv_heads,
        head_dim=heads.head_dim,
        max_position=min(config.max_position_embeddings, *_unscaled_lengths(config, origin)),
        bos_token_id=config.bos_token_id,
        eos_token_ids=() if end is None else tuple(end) if isinstance(end, list) else (end,),
        dtype=file.weight_dtype,
        raw=raw,
    )


def _unscaled_lengths(config: Any, origin: str) -> Iterator[int]:
    """Yield the longest contexts in which rotary frequencies do not depend on how long the context is."""
    yield config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):
        if scaling.get("rope_type", scaling.get("type")) in ("longrope", "su"):
            for owner in (scaling, config.to_dict()):
                yield owner.get("original_max_position_embeddings") or config.max_position_embeddings


def _encoder(config: Any, file: ClassifierFile, raw: Mapping[str, Any]) -> GenericEncoderConfig:
    labels = file.labels()
    if config.pad_token_id is None and any(name.endswith("ForSequenceClassification") for name in file.architectures):
        raise file.error(
            "pad_token_id", "a classifier looks for the last token that is not padding: set it to the tokenizer's"
        )
    return GenericEncoderConfig(
        model_type=file.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_position=config.max_position_embeddings,
        position_offset=(config.pad_token_id or 0) + 1 if file.model_type in _OFFSET else 0,
        type_vocab_size=getattr(config, "type_vocab_size", 1),
        pad_token_id=config.pad_token_id or 0,
        labels=labels,
        scores=file.scores(len(labels)),
        dtype=file.weight_dtype,
        raw=raw,
    )
