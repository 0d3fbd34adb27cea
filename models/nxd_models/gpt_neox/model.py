"""The GPT-NeoX family. Parameters have their Hugging Face names. Parallel over the context they are built in.

Shapes: B rows, S positions, E hidden size, H heads of this rank, D head dimension, R rotated part of it, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import AxisPlan
from nxd_infer.ops import cache_attention
from nxd_infer.parallel_layers.layers import ParallelEmbedding
from nxd_models.causal import CausalModel, seen, sequence_positions
from nxd_models.gpt_neox.config import NeoXConfig
from nxd_models.layers import ACTIVATIONS, first_linear, last_linear, normal_init, zero_biases
from nxd_models.rope import Rotary, rotate
from nxd_models.serving.kv_cache import LayerCache
from nxd_models.spec import Cut


def tensor_parallel_plan(config: NeoXConfig, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    # One weight has each head's query, key and value together.
    fused = AxisPlan.heads(config.num_heads, 3 * config.head_dim)
    heads = AxisPlan.heads(config.num_heads, config.head_dim)
    inner, vocabulary = AxisPlan.padded(config.intermediate_size), AxisPlan.padded(config.vocab_size)
    return {
        "gpt_neox.embed_in": Cut(0, vocabulary),
        "gpt_neox.layers.*.attention.query_key_value": Cut(0, fused),
        "gpt_neox.layers.*.attention.dense": Cut(1, heads),
        "gpt_neox.layers.*.mlp.dense_h_to_4h": Cut(0, inner),
        "gpt_neox.layers.*.mlp.dense_4h_to_h": Cut(1, inner),
        "embed_out": Cut(0, vocabulary),
    }


def _axis(layer: str, config: NeoXConfig) -> AxisPlan:
    """Return how this layer is sharded at the degree of the context."""
    return tensor_parallel_plan(config, current_context().tp.degree)[layer].axis


class Attention(nn.Module):
    """Causal attention; the first elements of each head have rotary position embedding."""

    def __init__(self, config: NeoXConfig, dtype: torch.dtype):
        super().__init__()
        hidden, bias, layer = config.hidden_size, config.attention_bias, "gpt_neox.layers.*.attention"
        self.query_key_value = first_linear(config, 3 * hidden, bias, _axis(f"{layer}.query_key_value", config), dtype)
        self.dense = last_linear(config, hidden, bias, _axis(f"{layer}.dense", config), dtype)
        self.head_dim, self.rotated, self.scale = config.head_dim, config.rotary_size, config.head_dim**-0.5
        self.rotary = Rotary(config.rotary_size, config.rope)

    def forward(
        self, x_BSE: Tensor, positions_BS: Tensor, mask_BS: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        B, S, _ = x_BSE.shape
        q, k, v = self.query_key_value(x_BSE).view(B, S, -1, 3 * self.head_dim).chunk(3, -1)
        cos, sin = self.rotary(positions_BS, q.dtype)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        if cache is None:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            allowed = seen(mask_BS)
            attended = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=allowed is None, scale=self.scale)
            attended = attended.transpose(1, 2)
        else:
            attended = cache_attention(q, k, v.contiguous(), *cache, self.scale)
        return self.dense(attended.reshape(B, S, -1))

    def _rotate(self, x_BSHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, kept = x_BSHD.split([self.rotated, self.head_dim - self.rotated], -1)
        return torch.cat((rotate(turned, cos, sin), kept), -1)


class FeedForward(nn.Module):
    def __init__(self, config: NeoXConfig, dtype: torch.dtype):
        super().__init__()
        inner, layer = config.intermediate_size, "gpt_neox.layers.*.mlp"
        self.dense_h_to_4h = first_linear(config, inner, True, _axis(f"{layer}.dense_h_to_4h", config), dtype)
        self.dense_4h_to_h = last_linear(config, inner, True, _axis(f"{layer}.dense_4h_to_h", config), dtype)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))


class Layer(nn.Module):
    """One block; all arguments except the hidden state are optional."""

    nxd_repeats = True

    def __init__(self, config: NeoXConfig, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype)
        self.mlp = FeedForward(config, dtype)
        self.parallel_residual = config.parallel_residual

    def forward(
        self,
        x_BSE: Tensor,
        positions_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``positions`` defaults to 0, 1, 2, ..."""
        if positions_BS is None:
            positions_BS = sequence_positions(x_BSE)
        attended = x_BSE + self.attention(self.input_layernorm(x_BSE), positions_BS, mask_BS, cache)
        source = x_BSE if self.parallel_residual else attended
        return attended + self.mlp(self.post_attention_layernorm(source))


class Decoder(nn.Module):
    """Embedding, layers and final norm, without the output head."""

    def __init__(self, config: NeoXConfig, dtype: torch.dtype):
        super().__init__()
        init = normal_init(config.initializer_range)
        self.embed_in = ParallelEmbedding(config.vocab_size, config.hidden_size, init, dtype, pad=True)
        self.layers = nn.ModuleList(Layer(config, dtype) for _ in range(config.num_layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, config.norm_eps, dtype=dtype)

    def forward(
        self,
        ids_BS: Tensor,
        positions_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """Ids [B, S] -> final hidden states [B, S, E]. ``caches`` holds one entry per layer."""
        hidden = self.embed_in(ids_BS)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, positions_BS, mask_BS, None if caches is None else caches[i])
        return self.final_layer_norm(hidden)


class CausalLM(CausalModel):
    """A decoder of the GPT-NeoX family."""

    def __init__(self, config: NeoXConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.context = config, current_context()
        self.gpt_neox = Decoder(config, dtype)
        self.embed_out = first_linear(config, config.vocab_size, False, _axis("embed_out", config), dtype)
        zero_biases(self)

    @property
    def decoder(self) -> Decoder:
        return self.gpt_neox

    def parallel_logits(self, hidden_BSE: Tensor) -> Tensor:
        return self.embed_out(hidden_BSE)
