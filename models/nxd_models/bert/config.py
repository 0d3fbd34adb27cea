"""``config.json`` of BERT, MiniLM and RoBERTa."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_models.hf.config_file import ClassifierFile, Count, Positive, TokenId
from nxd_models.layers import Activation
from nxd_models.spec import EncoderConfig


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """A bidirectional encoder of the BERT family."""

    intermediate_size: int
    num_heads: int
    norm_eps: float = 1e-12
    activation: str = "gelu"
    initializer_range: float = 0.02


class BertFile(ClassifierFile):
    """The fields of ``config.json``. Dropout rates are ignored: these models are trained without dropout."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    max_position_embeddings: Count
    position_embedding_type: Any = "absolute"
    type_vocab_size: Count = 2
    layer_norm_eps: Positive = 1e-12
    hidden_act: Activation = "gelu"
    pad_token_id: TokenId | None = None
    initializer_range: Positive = 0.02
    tie_word_embeddings: Any = True
    is_decoder: Any = False
    add_cross_attention: Any = False

    def config(self) -> BertConfig:
        if self.position_embedding_type != "absolute":
            raise self.error("position_embedding_type", "only absolute positions are supported")
        self.require_known()
        self.refuse("is_decoder", "only encoders are supported in this family")
        self.refuse("add_cross_attention", "only encoders are supported in this family")
        hidden, heads, roberta = self.hidden_size, self.num_attention_heads, self.model_type == "roberta"
        if hidden % heads:
            raise self.error("hidden_size", f"does not divide over {heads} heads")
        padding = int(roberta) if self.pad_token_id is None else self.pad_token_id
        labels = self.labels()
        return BertConfig(
            model_type=self.model_type,
            vocab_size=self.vocab_size,
            hidden_size=hidden,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=heads,
            max_position=self.max_position_embeddings,
            position_offset=padding + 1 if roberta else 0,
            type_vocab_size=self.type_vocab_size,
            norm_eps=self.layer_norm_eps,
            activation=self.hidden_act,
            pad_token_id=padding,
            labels=labels,
            scores=self.scores(len(labels)),
            initializer_range=self.initializer_range,
            dtype=self.weight_dtype,
        )


def read_config(raw: Mapping[str, Any], origin: str = "config.json") -> BertConfig:
    return BertFile.read(raw, origin).config()
