"""The BERT family: BERT, MiniLM and RoBERTa encoders. For their heads see :mod:`nxd_models.bert.heads`.

Parameters have their Hugging Face names. Parallel over the context they are built in, at any degree.

Shapes: B rows, S positions, E hidden size, H heads of this rank, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ModelConfigError
from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding
from nxd_models.bert.config import BertConfig
from nxd_models.layers import ACTIVATIONS, first_linear, last_linear, normal_init, zero_biases
from nxd_models.spec import Cut


def tensor_parallel_plan(config: BertConfig, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    head_dim = config.hidden_size // config.num_heads
    heads = gqa_plan(config.num_heads, config.num_heads, degree).q_axis(head_dim)
    inner = AxisPlan.padded(config.intermediate_size)
    return {
        "embeddings.word_embeddings": Cut(0, AxisPlan.padded(config.vocab_size)),
        "encoder.layer.*.attention.self.query": Cut(0, heads),
        "encoder.layer.*.attention.self.key": Cut(0, heads),
        "encoder.layer.*.attention.self.value": Cut(0, heads),
        "encoder.layer.*.attention.output.dense": Cut(1, heads),
        "encoder.layer.*.intermediate.dense": Cut(0, inner),
        "encoder.layer.*.output.dense": Cut(1, inner),
    }


def _cut(layer: str, config: BertConfig) -> AxisPlan:
    """Return how this layer of a block is sharded at the degree of the context."""
    return tensor_parallel_plan(config, current_context().tp.degree)[f"encoder.layer.*.{layer}"].axis


class Embeddings(nn.Module):
    """Words, positions and token types, summed and normalised."""

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        init, hidden = normal_init(config.initializer_range), config.hidden_size
        self.config = config
        self.word_embeddings = ParallelEmbedding(config.vocab_size, hidden, init, dtype, pad=True)
        self.position_embeddings = nn.Embedding(config.max_position, hidden, dtype=dtype)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, hidden, dtype=dtype)
        self.LayerNorm = nn.LayerNorm(hidden, config.norm_eps, dtype=dtype)
        for table in (self.position_embeddings, self.token_type_embeddings):
            init(table.weight)

    def forward(self, input_ids_BS: Tensor, token_type_ids_BS: Tensor | None) -> Tensor:
        if token_type_ids_BS is None:
            token_type_ids_BS = torch.zeros_like(input_ids_BS)
        words = self.word_embeddings(input_ids_BS)
        types = self.token_type_embeddings(token_type_ids_BS)
        return self.LayerNorm(words + self.position_embeddings(self._positions(input_ids_BS)) + types)

    def _positions(self, ids_BS: Tensor) -> Tensor:
        if self.config.model_type != "roberta":
            return torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
        # RoBERTa numbers only non-padding tokens, starting after the padding token's own row.
        token = (ids_BS != self.config.pad_token_id).long()
        return token.cumsum(1) * token + self.config.pad_token_id


class SelfAttention(nn.Module):
    """Projections and bidirectional attention; heads are not split."""

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_heads
        rows = _cut("attention.self.query", config).local_size(current_context().tp.degree)
        self.heads = rows // self.head_dim

        def project(name: str) -> ColumnParallelLinear:
            return first_linear(config, config.hidden_size, True, _cut(f"attention.self.{name}", config), dtype)

        self.query = project("query")
        self.key = project("key")
        self.value = project("value")

    def forward(self, x_BSE: Tensor, allowed_B11S: Tensor | None) -> Tensor:
        B, S, _ = x_BSE.shape
        q, k, v = (
            project(x_BSE).view(B, S, self.heads, self.head_dim).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v, allowed_B11S)
        return out.transpose(1, 2).reshape(B, S, self.heads * self.head_dim)


class Output(nn.Module):
    """Project back to the hidden size, add the branch's input, normalise."""

    def __init__(self, size: int, axis: AxisPlan, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = last_linear(config, size, True, axis, dtype)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class AttentionBlock(nn.Module):
    """``attention.self`` and ``attention.output`` of the checkpoints."""

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.self = SelfAttention(config, dtype)
        axis = _cut("attention.output.dense", config)
        self.output = Output(config.hidden_size, axis, config, dtype)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        return self.output(self.self(x, allowed), x)


class Intermediate(nn.Module):
    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = first_linear(config, config.intermediate_size, True, _cut("intermediate.dense", config), dtype)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class EncoderLayer(nn.Module):
    """One block: hidden [B, S, E] in and out."""

    nxd_repeats = True

    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.attention = AttentionBlock(config, dtype)
        self.intermediate = Intermediate(config, dtype)
        self.output = Output(config.intermediate_size, _cut("output.dense", config), config, dtype)

    def forward(self, hidden: Tensor, allowed: Tensor | None = None) -> Tensor:
        hidden = self.attention(hidden, allowed)
        return self.output(self.intermediate(hidden), hidden)


class LayerStack(nn.Module):
    def __init__(self, config: BertConfig, dtype: torch.dtype):
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(config, dtype) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, allowed)
        return hidden


class Encoder(nn.Module):
    """Embeddings and layers: ids to hidden states."""

    def __init__(self, config: BertConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, dtype)
        self.encoder = LayerStack(config, dtype)
        zero_biases(self)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return hidden states [B, S, E]. ``attention_mask`` [B, S] is 1 for tokens, 0 for padding. Inputs are int64.

        Raises ModelConfigError if S exceeds the position table.
        """
        limit = self.config.max_length
        if input_ids.shape[1] > limit:
            raise ModelConfigError(
                f"an input of {input_ids.shape[1]} tokens is beyond max_position_embeddings = "
                f"{self.config.max_position} of this {self.config.model_type} model; use at most {limit} tokens"
            )
        allowed = None
        if attention_mask is not None:
            seen = attention_mask.bool()
            # A row without tokens attends to all of its padding, because an empty row of scores would be NaN.
            allowed = (seen | ~seen.any(-1, keepdim=True))[:, None, None, :]
        return self.encoder(self.embeddings(input_ids, token_type_ids), allowed)
