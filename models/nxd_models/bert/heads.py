"""Heads on an encoder of the BERT family: pooling for embeddings, or a classifier.

Shapes: B rows, S positions, E hidden size, C labels.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_models.bert.config import BertConfig
from nxd_models.bert.model import Encoder
from nxd_models.layers import zero_biases
from nxd_models.serving.pooling import SentencePooling


class SentenceEncoder(SentencePooling, Encoder):
    """An encoder that returns one vector per text."""


class Pooler(nn.Module):
    """``tanh(dense(first token))``."""

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype)

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden_BSE[:, 0]))


class PooledEncoder(Encoder):
    """An encoder with BERT's pooler; returns [B, E]."""

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__(config, dtype)
        self.pooler = Pooler(config, dtype)
        zero_biases(self.pooler)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.pooler(super().forward(*inputs))  # pyright: ignore[reportArgumentType]


class BertClassifier(nn.Module):
    """BERT's sequence classification: pooler, then a linear layer."""

    def __init__(self, config: BertConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.bert = PooledEncoder(config, dtype)
        self.classifier = nn.Linear(config.hidden_size, len(config.labels), dtype=dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Map ids and mask [B, S] to float32 logits [B, C]."""
        return self.classifier(self.bert(input_ids, attention_mask, token_type_ids)).float()


class RobertaHead(nn.Module):
    """``out_proj(tanh(dense(first token)))``."""

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype)
        self.out_proj = nn.Linear(config.hidden_size, len(config.labels), dtype=dtype)

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.dense(hidden_BSE[:, 0])))


class RobertaClassifier(nn.Module):
    """RoBERTa's sequence classification: a two-layer head on the first token."""

    def __init__(self, config: BertConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.roberta = Encoder(config, dtype)
        self.classifier = RobertaHead(config, dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Map ids and mask [B, S] to float32 logits [B, C]."""
        return self.classifier(self.roberta(input_ids, attention_mask, token_type_ids)).float()
