"""The BERT family: BERT, MiniLM and RoBERTa encoders, with pooling for embeddings or a classification head.

Parameters have their Hugging Face names. Parallel over the context of construction at any degree, as the decoders.

Shapes: B rows, S positions, E hidden size, H heads of this rank, D head dimension, C labels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ModelConfigError
from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_models.hf.config import EncoderConfig
from nxd_models.hf.sentence_transformers import pool, pooling_modes
from nxd_models.layers import ACTIVATIONS, normal_init, zero_biases


class Embeddings(nn.Module):
    """Words, positions and token types, summed and normalised."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
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
        # RoBERTa counts the tokens that are not padding, from the row after the padding token's own.
        token = (ids_BS != self.config.pad_token_id).long()
        return token.cumsum(1) * token + self.config.pad_token_id


class SelfAttention(nn.Module):
    """Projections and bidirectional attention; heads are whole on a rank."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        plan = gqa_plan(config.num_heads, config.num_heads, current_context().tp.degree)
        self.heads, self.head_dim = plan.heads_per_rank, config.hidden_size // config.num_heads
        init = normal_init(config.initializer_range)

        def project() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                config.hidden_size,
                config.hidden_size,
                gather_output=False,
                dtype=dtype,
                init_method=init,
                output_plan=plan.q_axis(self.head_dim),
            )

        self.query = project()
        self.key = project()
        self.value = project()

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

    def __init__(self, size: int, plan: AxisPlan, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = RowParallelLinear(
            size,
            config.hidden_size,
            input_is_parallel=True,
            dtype=dtype,
            init_method=normal_init(config.initializer_range),
            input_plan=plan,
        )
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class AttentionBlock(nn.Module):
    """``attention.self`` and ``attention.output`` of the checkpoints."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.self = SelfAttention(config, dtype)
        self.output = Output(config.hidden_size, self.self.query.output_plan, config, dtype)

    def forward(self, x: Tensor, allowed: Tensor | None) -> Tensor:
        return self.output(self.self(x, allowed), x)


class Intermediate(nn.Module):
    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = ColumnParallelLinear(
            config.hidden_size,
            config.intermediate_size,
            gather_output=False,
            dtype=dtype,
            init_method=normal_init(config.initializer_range),
            output_plan=AxisPlan.padded(config.intermediate_size),
        )
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class EncoderLayer(nn.Module):
    """One block: hidden [B, S, E] in and out."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.attention = AttentionBlock(config, dtype)
        self.intermediate = Intermediate(config, dtype)
        self.output = Output(config.intermediate_size, AxisPlan.padded(config.intermediate_size), config, dtype)

    def forward(self, hidden: Tensor, allowed: Tensor | None = None) -> Tensor:
        hidden = self.attention(hidden, allowed)
        return self.output(self.intermediate(hidden), hidden)


class LayerStack(nn.Module):
    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(config, dtype) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, allowed)
        return hidden


class Encoder(nn.Module):
    """Embeddings and layers: ids to hidden states."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config, dtype)
        self.encoder = LayerStack(config, dtype)
        zero_biases(self)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Hidden states [B, S, E]. ``attention_mask`` [B, S] is 1 for tokens, 0 for padding; all three are int64.

        Raises ModelConfigError when S exceeds the position table.
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
            # A row without a token sees all of its padding: an empty row of scores would be NaN.
            allowed = (seen | ~seen.any(-1, keepdim=True))[:, None, None, :]
        return self.encoder(self.embeddings(input_ids, token_type_ids), allowed)


# --- embeddings ---------------------------------------------------------------------------------------


class SentenceEncoder(Encoder):
    """One vector a text: an encoder, pooling over its tokens, and scaling to length 1 where ``normalize``.

    ``pooling``: one of :data:`nxd_models.hf.sentence_transformers.POOLINGS`, or several joined by ``+``.
    """

    def __init__(
        self,
        config: EncoderConfig,
        dtype: torch.dtype = torch.float32,
        *,
        pooling: str = "mean",
        normalize: bool = True,
    ):
        super().__init__(config, dtype)
        pooling_modes(pooling)
        self.pooling, self.normalize = pooling, normalize

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Ids and mask [B, S] -> float32 [B, E times modes of pooling]."""
        pooled = pool(super().forward(input_ids, attention_mask, token_type_ids), attention_mask, self.pooling)
        return F.normalize(pooled, dim=-1) if self.normalize else pooled


# --- classification -----------------------------------------------------------------------------------


class Pooler(nn.Module):
    """``tanh(dense(first token))``."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype)

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        return torch.tanh(self.dense(hidden_BSE[:, 0]))


class PooledEncoder(Encoder):
    """An encoder with BERT's pooler; gives [B, E]."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__(config, dtype)
        self.pooler = Pooler(config, dtype)
        zero_biases(self.pooler)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.pooler(super().forward(*inputs))  # pyright: ignore[reportArgumentType]


class BertClassifier(nn.Module):
    """BERT's sequence classification: pooler, then a linear layer."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.bert = PooledEncoder(config, dtype)
        self.classifier = nn.Linear(config.hidden_size, len(config.labels), dtype=dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Ids and mask [B, S] -> float32 logits [B, C]."""
        return self.classifier(self.bert(input_ids, attention_mask, token_type_ids)).float()


class RobertaHead(nn.Module):
    """``out_proj(tanh(dense(first token)))``."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, dtype=dtype)
        self.out_proj = nn.Linear(config.hidden_size, len(config.labels), dtype=dtype)

    def forward(self, hidden_BSE: Tensor) -> Tensor:
        return self.out_proj(torch.tanh(self.dense(hidden_BSE[:, 0])))


class RobertaClassifier(nn.Module):
    """RoBERTa's sequence classification: a head of two layers over the first token."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.roberta = Encoder(config, dtype)
        self.classifier = RobertaHead(config, dtype)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Ids and mask [B, S] -> float32 logits [B, C]."""
        return self.classifier(self.roberta(input_ids, attention_mask, token_type_ids)).float()


def classifier(config: EncoderConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The sequence classifier of the configuration's family."""
    return (RobertaClassifier if config.model_type == "roberta" else BertClassifier)(config, dtype)


# --- what is traced -----------------------------------------------------------------------------------


class EncoderStep(nn.Module):
    """Mixin over a module that takes ids, mask and types: names its output, and says how a call may be padded.

    Rows and positions are padded: ids with the padding token, mask and types with 0. No row of another call, and no
    padding, has an influence on a row, because the mask hides it.
    """

    nxd_output = ""
    config: EncoderConfig

    @property
    def nxd_inputs(self) -> dict[str, dict[str, Any]]:
        pad = self.config.pad_token_id
        declared: dict[str, dict[str, Any]] = {
            "input_ids": {"role": "tokens", "pad": {0: pad, 1: pad}, "maximum": self.config.vocab_size - 1},
            "attention_mask": {"role": "mask", "pad": {0: 0, 1: 0}, "maximum": 1},
            "token_type_ids": {
                "role": "types",
                "pad": {0: 0, 1: 0},
                "default": 0,
                "maximum": self.config.type_vocab_size - 1,
            },
        }
        return {name: {"minimum": 0, **entry} for name, entry in declared.items()}

    @property
    def nxd_outputs(self) -> dict[str, dict[str, Any]]:
        return {self.nxd_output: {"role": self.nxd_output, "cut": {0: ("input_ids", 0)}}}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict[str, Tensor]:
        """int64 [B, S] each -> ``{"embedding": float32 [B, E]}`` or ``{"logits": float32 [B, C]}``."""
        return {self.nxd_output: super().forward(input_ids, attention_mask, token_type_ids)}


class EmbedStep(EncoderStep, SentenceEncoder):
    nxd_output = "embedding"


class BertClassifyStep(EncoderStep, BertClassifier):
    nxd_output = "logits"


class RobertaClassifyStep(EncoderStep, RobertaClassifier):
    nxd_output = "logits"


def classify_step(config: EncoderConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """:func:`classifier` with its output named, for tracing."""
    return (RobertaClassifyStep if config.model_type == "roberta" else BertClassifyStep)(config, dtype)
