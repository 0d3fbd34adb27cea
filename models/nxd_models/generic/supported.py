"""Read the configuration of any model of transformers; refuse by name what one step cannot compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nxd_infer.errors import ModelConfigError
from nxd_models.generic.config import (
    GenericDecoderConfig,
    GenericEncoderConfig,
    architectures_for,
    library,
    transformers_config,
)
from nxd_models.generic.probe import layout_of, position_offset
from nxd_models.hf.config_file import ClassifierFile
from nxd_models.spec import DecoderConfig, EncoderConfig

ANY_LENGTH = 1 << 30
"""Of models without a table of positions."""
_ALWAYS_DECODERS = ("gpt_neox", "gpt_neox_japanese")
"""Types whose configuration may say that they are no decoders, without effect."""
_NOT_CAUSAL = "attention to later tokens cannot generate text token by token"
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
REFUSED = {
    "big_bird": "it attends to random blocks of the text",
    "convbert": "its convolutions read padding",
    "cpmant": "its positions count from the end of the text",
    "flaubert": "it decides by the lengths of texts",
    "fnet": "it mixes padding into the text",
    "funnel": "it pools positions, so padding changes its results",
    "mobilebert": "it reads the words beside each, padding too",
    "nystromformer": "it averages positions, so padding changes its results",
    "prophetnet": "its results depend on the length of the whole text",
    "reformer": "it hashes positions at random",
    "xlm": "it decides by the lengths of texts",
    "xlnet": "its classifier reads the last position, padding too",
    "yoso": "it samples by hashes",
}
"""Model types whose results for a text depend on more than the text."""


def read_config(raw: Mapping[str, Any], origin: str, *, embeds: bool = False) -> DecoderConfig | EncoderConfig:
    """A directory whose architecture generates is a decoder unless it ``embeds``, any other an encoder.

    Raises ModelConfigError naming what neither step can compute.
    """
    file = ClassifierFile.read(raw, origin)
    config = transformers_config(raw, origin)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelConfigError(
            f"{origin}: model_type = {file.model_type!r}: encoder-decoder models are not served in transformers' own "
            "module; without model_impl, t5 is served in ours"
        )
    if (why := REFUSED.get(file.model_type)) is not None:
        raise ModelConfigError(f"{origin}: model_type = {file.model_type!r}: {why}: it is not served")
    for name in file.architectures:
        if not hasattr(library(), name):
            raise file.error("architectures", f"transformers has no class {name!r}, and code of a directory is not run")
    if not embeds and set(file.architectures).intersection(architectures_for("generate", file.model_type)):
        if getattr(config, "is_decoder", None) is False and _may_encode(file.model_type):
            raise file.error("is_decoder", _NOT_CAUSAL)
        text = config.get_text_config(decoder=True)
        if getattr(text, "is_causal", None) is False:
            raise file.error("is_causal", _NOT_CAUSAL)
        if getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # Gemma 3 and 4; "vision": of images
            raise file.error("use_bidirectional_attention", _NOT_CAUSAL)
        return _decoder(config, file, raw, origin)
    return _encoder(config, file, raw)


def _may_encode(model_type: str) -> bool:
    """Whether models of a type are decoders only if their configuration says so."""
    if model_type in _ALWAYS_DECODERS:
        return False
    # Before transformers 5 every configuration has the field, false by default.
    named = model_type == "bert-generation" or bool(architectures_for("fill-mask", model_type))
    return named or int(library().__version__.partition(".")[0]) >= 5


def _decoder(config: Any, file: ClassifierFile, raw: Mapping[str, Any], origin: str) -> GenericDecoderConfig:
    text = config.get_text_config(decoder=True)
    layout = layout_of(raw)
    end = text.eos_token_id
    longest = _longest(text)
    return GenericDecoderConfig(
        model_type=file.model_type,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=layout.layers,
        num_heads=layout.kv_heads * layout.group,
        num_kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        why_whole=layout.why_whole,
        max_position=min(longest, *_unscaled_lengths(text, longest)),
        bos_token_id=text.bos_token_id,
        eos_token_ids=() if end is None else tuple(end) if isinstance(end, list) else (end,),
        dtype=file.weight_dtype,
        raw=raw,
    )


def _vocabulary(config: Any) -> int:
    found = getattr(config, "vocab_size", None)
    if found is None:
        raise ModelConfigError(f"{config.model_type}: vocab_size is missing: a model of characters is not served")
    return found


def _longest(config: Any) -> int:
    found = (getattr(config, name, None) for name in _POSITIONS)
    return next((value for value in found if isinstance(value, int) and value > 0), ANY_LENGTH)


def _unscaled_lengths(config: Any, longest: int) -> Iterator[int]:
    """Yield the longest contexts in which rotary frequencies do not depend on how long the context is."""
    yield longest
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for scaling in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):
        if scaling.get("rope_type", scaling.get("type")) in ("longrope", "su"):
            for owner in (scaling, config.to_dict()):
                yield owner.get("original_max_position_embeddings") or longest


def _encoder(config: Any, file: ClassifierFile, raw: Mapping[str, Any]) -> GenericEncoderConfig:
    labels, text = file.labels(), config.get_text_config()
    pad = getattr(text, "pad_token_id", None)
    if pad is None and set(file.architectures).intersection(architectures_for("classify", file.model_type)):
        raise file.error(
            "pad_token_id", "a classifier looks for the last token that is not padding: set it to the tokenizer's"
        )
    return GenericEncoderConfig(
        model_type=file.model_type,
        vocab_size=_vocabulary(text),
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        max_position=_longest(text),
        position_offset=position_offset(raw),
        type_vocab_size=max(1, getattr(text, "type_vocab_size", None) or 1),
        pad_token_id=pad or 0,
        labels=labels,
        scores=file.scores(len(labels)),
        dtype=file.weight_dtype,
        raw=raw,
    )
