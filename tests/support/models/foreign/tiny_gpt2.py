"""GPT-2 as somebody else's package would add it: nothing of ours knows this file.

It differs from our families in all that a family can differ in: names of the configuration's fields, learned positions,
LayerNorm, biases, weights that checkpoints hold transposed and fused ([inputs, 3 * outputs]), a tied head.

Shapes: B rows, S positions, E hidden size, H heads of this rank, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.hugging_face.stored import StoredWeight
from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_infer.ops import cache_attention
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from nxd_models.hf.config_file import Count, ModelFile, Positive, SpecialTokens
from nxd_models.layers import ACTIVATIONS, Activation
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.serving.kv_cache import LayerCache
from nxd_models.spec import Cut, DecoderConfig, ModelSpec, Task


@dataclass(frozen=True, kw_only=True)
class GPT2Config(DecoderConfig):
    inner_size: int
    norm_eps: float
    activation: str


class GPT2File(ModelFile, SpecialTokens):
    vocab_size: Count
    n_embd: Count
    n_layer: Count
    n_head: Count
    n_positions: Count
    n_inner: Count | None = None
    layer_norm_epsilon: Positive = 1e-5
    activation_function: Activation = "gelu_new"


def read_config(raw: Mapping[str, Any], origin: str) -> GPT2Config:
    file = GPT2File.read(raw, origin)
    if file.n_embd % file.n_head:
        raise file.error("n_embd", f"does not divide over {file.n_head} heads")
    return GPT2Config(
        model_type=file.model_type,
        vocab_size=file.vocab_size,
        hidden_size=file.n_embd,
        num_layers=file.n_layer,
        num_heads=file.n_head,
        num_kv_heads=file.n_head,
        head_dim=file.n_embd // file.n_head,
        max_position=file.n_positions,
        inner_size=file.n_inner or 4 * file.n_embd,
        norm_eps=file.layer_norm_epsilon,
        activation=file.activation_function,
        bos_token_id=file.bos,
        eos_token_ids=file.eos,
        dtype=file.weight_dtype,
    )


def tensor_parallel_plan(config: GPT2Config, degree: int) -> dict[str, Cut]:
    heads = gqa_plan(config.num_heads, config.num_kv_heads, degree).q_axis(config.head_dim)
    inner = AxisPlan.padded(config.inner_size)
    return {
        "transformer.wte": Cut(0, AxisPlan.padded(config.vocab_size)),
        "transformer.h.*.attn.query": Cut(0, heads),
        "transformer.h.*.attn.key": Cut(0, heads),
        "transformer.h.*.attn.value": Cut(0, heads),
        "transformer.h.*.attn.out": Cut(1, heads),
        "transformer.h.*.mlp.up": Cut(0, inner),
        "transformer.h.*.mlp.down": Cut(1, inner),
    }


def column(size: int, out: int, axis: AxisPlan, dtype: torch.dtype) -> ColumnParallelLinear:
    return ColumnParallelLinear(size, out, gather_output=False, dtype=dtype, output_plan=axis)


def row(size: int, out: int, axis: AxisPlan, dtype: torch.dtype) -> RowParallelLinear:
    return RowParallelLinear(size, out, input_is_parallel=True, dtype=dtype, input_plan=axis)


class Attention(nn.Module):
    def __init__(self, config: GPT2Config, dtype: torch.dtype):
        super().__init__()
        degree, hidden = current_context().tp.degree, config.hidden_size
        heads = tensor_parallel_plan(config, degree)["transformer.h.*.attn.query"].axis
        self.heads, self.head_dim = heads.local_size(degree) // config.head_dim, config.head_dim
        self.query, self.key, self.value = (column(hidden, hidden, heads, dtype) for _ in range(3))
        self.out = row(hidden, hidden, heads, dtype)

    def forward(self, x_BSE: Tensor, cache: LayerCache | None) -> Tensor:
        B, S, _ = x_BSE.shape
        q, k, v = (f(x_BSE).view(B, S, self.heads, self.head_dim) for f in (self.query, self.key, self.value))
        if cache is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            attended = cache_attention(q, k, v, *cache, self.head_dim**-0.5)
        return self.out(attended.reshape(B, S, -1))


class FeedForward(nn.Module):
    def __init__(self, config: GPT2Config, dtype: torch.dtype):
        super().__init__()
        inner = tensor_parallel_plan(config, current_context().tp.degree)["transformer.h.*.mlp.up"].axis
        self.up = column(config.hidden_size, config.inner_size, inner, dtype)
        self.down = row(config.inner_size, config.hidden_size, inner, dtype)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPT2Config, dtype: torch.dtype):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.mlp = FeedForward(config, dtype)

    def forward(self, hidden: Tensor, cache: LayerCache | None = None) -> Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), cache)
        return hidden + self.mlp(self.ln_2(hidden))


class Transformer(nn.Module):
    def __init__(self, config: GPT2Config, dtype: torch.dtype):
        super().__init__()
        self.wte = ParallelEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, pad=True)
        self.wpe = nn.Embedding(config.max_position, config.hidden_size, dtype=dtype)
        self.h = nn.ModuleList(Block(config, dtype) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)

    def forward(self, ids: Tensor, positions: Tensor, caches: Sequence[LayerCache] | None = None) -> Tensor:
        hidden = self.wte(ids) + self.wpe(positions.clamp(max=self.wpe.num_embeddings - 1))
        for i, block in enumerate(self.h):
            hidden = block(hidden, None if caches is None else caches[i])
        return self.ln_f(hidden)


class GPT2LMHead(nn.Module):
    def __init__(self, config: GPT2Config, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.context = config, current_context()
        self.transformer = Transformer(config, dtype)

    def hidden_states(self, ids: Tensor, positions: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        return self.transformer(ids, positions, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        whole = gather_from_tensor_model_parallel_region(
            F.linear(hidden, self.transformer.wte.weight), context=self.context
        )
        return whole[..., : self.config.vocab_size]

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return self.logits(self.transformer(input_ids, positions))


class GPT2Step(DecoderStep, GPT2LMHead):
    pass


def _stored() -> dict[str, StoredWeight]:
    """Linear layers are kept as Conv1D, [inputs, outputs]; queries, keys and values lie side by side."""
    found = {}
    for kind, transposed in (("weight", True), ("bias", False)):
        for ours, theirs in (("attn.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            found[f"transformer.h.*.{ours}.{kind}"] = StoredWeight(
                f"transformer.h.*.{theirs}.{kind}", transposed=transposed
            )
        for part, ours in enumerate(("query", "key", "value")):
            found[f"transformer.h.*.attn.{ours}.{kind}"] = StoredWeight(
                f"transformer.h.*.attn.c_attn.{kind}", part, parts=3, transposed=transposed
            )
    return found


GPT2 = ModelSpec(
    model_types=("gpt2",),
    read_config=read_config,
    tasks={"generate": Task(GPT2LMHead, GPT2Step, blocks="transformer.h")},
    tensor_parallel_plan=tensor_parallel_plan,
    stored_weights=_stored(),
    adapter_targets=("query", "key", "value", "out", "up", "down"),
)
