"""``config.json`` of T5, as transformers 4 and 5 write it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_models.hf.config_file import Count, Flag, ModelFile, Positive, SpecialTokens, TokenId
from nxd_models.layers import ACTIVATIONS
from nxd_models.spec import DecoderConfig

ANY_LENGTH = 1 << 30
"""Positions are relative, and those far away are all alike, so contexts may have any length."""


@dataclass(frozen=True, kw_only=True)
class T5Config(DecoderConfig):
    """An encoder-decoder model of the T5 family; ``num_layers`` are the decoder's."""

    encoder_layers: int
    inner_size: int
    """Features of the feed-forward layers."""
    activation: str
    gated: bool
    position_buckets: int
    position_distance: int
    """Positions at least so far apart share the last bucket."""
    norm_eps: float
    scaled: bool
    """The head reads states times ``hidden_size ** -0.5``; it is the embedding then, otherwise a layer of its own."""
    decoder_start: int
    """The token before every answer."""
    trained_length: int
    """Tokens of a prompt, and of an answer, in training."""

    @property
    def usual_length(self) -> int:
        return 2 * self.trained_length


class T5File(ModelFile, SpecialTokens):
    """The fields of ``config.json``. Dropout rates are ignored."""

    vocab_size: Count
    d_model: Count
    d_kv: Count
    d_ff: Count
    num_layers: Count
    num_decoder_layers: Count | None = None
    num_heads: Count
    relative_attention_num_buckets: Count = 32
    relative_attention_max_distance: Count = 128
    layer_norm_epsilon: Positive = 1e-6
    feed_forward_proj: str = "relu"
    dense_act_fn: str | None = None
    is_gated_act: Flag | None = None
    tie_word_embeddings: Flag = True
    scale_decoder_outputs: Flag | None = None
    decoder_start_token_id: TokenId
    n_positions: Count = 512

    def config(self) -> T5Config:
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 4:
            raise self.error("relative_attention_num_buckets", "expected a multiple of 4")
        if distance <= buckets // 2:
            raise self.error("relative_attention_max_distance", f"expected more than {buckets // 2}")
        if self.decoder_start_token_id >= self.vocab_size:
            raise self.error("decoder_start_token_id", f"the vocabulary has {self.vocab_size} tokens")
        kind, _, function = self.feed_forward_proj.rpartition("-")
        activation = self.dense_act_fn or ("gelu_new" if self.feed_forward_proj == "gated-gelu" else function)
        if kind not in ("", "gated") or activation not in ACTIVATIONS:
            raise self.error(
                "dense_act_fn" if self.dense_act_fn else "feed_forward_proj",
                f"this activation is not supported; known are {', '.join(ACTIVATIONS)}, and each of them gated",
            )
        scaled = self.tie_word_embeddings if self.scale_decoder_outputs is None else self.scale_decoder_outputs
        return T5Config(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=self.d_model,
            num_layers=self.num_decoder_layers or self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.d_kv,
            max_position=ANY_LENGTH,
            encoder_layers=self.num_layers,
            inner_size=self.d_ff,
            activation=activation,
            gated=kind == "gated" if self.is_gated_act is None else self.is_gated_act,
            position_buckets=buckets,
            position_distance=distance,
            norm_eps=self.layer_norm_epsilon,
            scaled=scaled,
            decoder_start=self.decoder_start_token_id,
            trained_length=self.n_positions,
            bos_token_id=self.bos,
            eos_token_ids=self.eos,
            dtype=self.weight_dtype,
        )


def read_config(raw: Mapping[str, Any], origin: str = "config.json") -> T5Config:
    return T5File.read(raw, origin).config()
