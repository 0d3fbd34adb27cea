"""The Llama family as one decoder: Llama 2 and 3, Mistral, Qwen2 (biases), Qwen3 (query and key norms), and Mixtral and
Qwen3-MoE, whose feed-forward blocks are experts (:mod:`nxd_models.llama.mixture`).

The same module trains (``model(input_ids, labels=...)``) and serves (``model.hidden_states(ids, positions, caches)``,
then ``model.logits(hidden)``). Its parameters have their Hugging Face names. It is parallel over the context it is
built in, at any degree. If built sequence parallel (for training), hidden states between the parallel blocks are this
rank's S / degree positions.

Shapes: B rows, S positions, E hidden size, H query heads of this rank, K key/value heads of this rank, D head
dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.layout import AxisPlan, gqa_plan
from nxd_infer.ops import cache_attention
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.layers import ParallelEmbedding
from nxd_infer.parallel_layers.sequence_parallel import building_sequence_parallel
from nxd_models.causal import CausalModel, seen, sequence_positions
from nxd_models.layers import (
    ACTIVATIONS,
    SEQUENCE,
    ParallelBlock,
    RMSNorm,
    first_linear,
    last_linear,
    normal_init,
    zero_biases,
)
from nxd_models.llama.config import LlamaConfig
from nxd_models.llama.mixture import Experts, balancing_loss, cuts
from nxd_models.rope import Rotary, rotate
from nxd_models.serving.kv_cache import LayerCache
from nxd_models.spec import Cut


def tensor_parallel_plan(config: LlamaConfig, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    heads = gqa_plan(config.num_heads, config.num_kv_heads, degree)
    queries, keys = heads.q_axis(config.head_dim), heads.kv_axis(config.head_dim)
    inner, vocabulary = AxisPlan.padded(config.intermediate_size), AxisPlan.padded(config.vocab_size)
    mixtures = [config.mixture_of(layer) for layer in range(config.num_layers)]
    dense = {
        "model.layers.*.mlp.gate_proj": Cut(0, inner),
        "model.layers.*.mlp.up_proj": Cut(0, inner),
        "model.layers.*.mlp.down_proj": Cut(1, inner),
    }
    experts = {f"model.layers.*.mlp.experts.{name}": cut for mixture in mixtures for name, cut in cuts(mixture).items()}
    return {
        "model.embed_tokens": Cut(0, vocabulary),
        "model.layers.*.self_attn.q_proj": Cut(0, queries),
        "model.layers.*.self_attn.k_proj": Cut(0, keys),
        "model.layers.*.self_attn.v_proj": Cut(0, keys),
        "model.layers.*.self_attn.o_proj": Cut(1, queries),
        **(dense if None in mixtures else {}),
        **experts,
        **({} if config.tied else {"lm_head": Cut(0, vocabulary)}),
    }


class Attention(ParallelBlock):
    """Causal attention with grouped key/value heads and rotary position embedding."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, sequence_parallel: bool = False):
        super().__init__(sequence_parallel)
        dim, degree = config.head_dim, self.context.tp.degree
        plan = tensor_parallel_plan(config, degree)
        queries, keys, values, outputs = (plan[f"model.layers.*.self_attn.{x}_proj"].axis for x in "qkvo")
        self.heads, self.kv_heads = queries.local_size(degree) // dim, keys.local_size(degree) // dim
        self.head_dim, self.scale = dim, dim**-0.5
        self.q_proj = first_linear(config, config.num_heads * dim, config.qkv_bias, queries, dtype, shared=True)
        self.k_proj = first_linear(config, config.num_kv_heads * dim, config.qkv_bias, keys, dtype, shared=True)
        self.v_proj = first_linear(config, config.num_kv_heads * dim, config.qkv_bias, values, dtype, shared=True)
        self.o_proj = last_linear(config, config.num_heads * dim, config.output_bias, outputs, dtype, sequence_parallel)
        self.q_norm = RMSNorm(dim, config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(dim, config.norm_eps, dtype) if config.qk_norm else None
        self.rotary = Rotary(dim, config.rope)

    def forward(
        self, x_BSE: Tensor, positions_BS: Tensor, mask_BS: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        x_BSE = self.enter(x_BSE)
        B, S, _ = x_BSE.shape
        q = self.q_proj(x_BSE).view(B, S, self.heads, self.head_dim)
        k = self.k_proj(x_BSE).view(B, S, self.kv_heads, self.head_dim)
        v = self.v_proj(x_BSE).view(B, S, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normalised(self.q_norm, q), self._normalised(self.k_norm, k)
        total_B = positions_BS.amax(-1) + 1 if cache is None else cache.start + cache.length
        cos, sin = self.rotary(positions_BS, q.dtype, total_B)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is None:
            attended = self._attend(q, k, v, mask_BS)
        else:
            attended = cache_attention(
                q, k, v, cache.keys, cache.values, cache.block_table, cache.start, cache.length, self.scale
            )
        return self.o_proj(attended.reshape(B, S, self.heads * self.head_dim))

    def _normalised(self, norm: RMSNorm, heads_BSHD: Tensor) -> Tensor:
        # The weight is replicated but sees only this rank's heads, so its gradients are summed over the ranks.
        return norm(heads_BSHD, mappings.copy_to_tensor_model_parallel_region(norm.weight, context=self.context))

    def _attend(self, q_BSHD: Tensor, k_BSKD: Tensor, v_BSKD: Tensor, mask_BS: Tensor | None) -> Tensor:
        """Attend over the positions of this call only."""
        group = self.heads // self.kv_heads
        q = q_BSHD.transpose(1, 2)
        k = k_BSKD.repeat_interleave(group, 2).transpose(1, 2)
        v = v_BSKD.repeat_interleave(group, 2).transpose(1, 2)
        allowed = seen(mask_BS)
        out = F.scaled_dot_product_attention(q, k, v, allowed, is_causal=allowed is None, scale=self.scale)
        return out.transpose(1, 2)


class FeedForward(ParallelBlock):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, sequence_parallel: bool = False):
        super().__init__(sequence_parallel)
        inner, bias = config.intermediate_size, config.mlp_bias
        plan = tensor_parallel_plan(config, self.context.tp.degree)
        gate, up, down = (plan[f"model.layers.*.mlp.{x}_proj"].axis for x in ("gate", "up", "down"))
        self.gate_proj = first_linear(config, inner, bias, gate, dtype, shared=True)
        self.up_proj = first_linear(config, inner, bias, up, dtype, shared=True)
        self.down_proj = last_linear(config, inner, bias, down, dtype, sequence_parallel)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = self.enter(x)
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One transformer block; all arguments except the hidden state are optional."""

    nxd_repeats = True

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, sequence_parallel: bool = False, number: int = 0):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype, sequence_parallel)
        self.self_attn = Attention(config, dtype, sequence_parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, dtype, sequence_parallel)
        mixture = config.mixture_of(number)
        self.mlp = (
            FeedForward(config, dtype, sequence_parallel)
            if mixture is None
            else Experts(config, mixture, dtype, sequence_parallel)
        )

    def forward(
        self,
        hidden_BSE: Tensor,
        positions_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """``positions`` defaults to 0, 1, 2, ...; ``mask`` is 0 for padding, else the document's number.

        A layer with a cache takes no mask. A sequence-parallel layer takes the positions and the mask of the whole
        sequence, and needs the positions.
        """
        if positions_BS is None:
            positions_BS = sequence_positions(hidden_BSE)
        hidden_BSE = hidden_BSE + self.self_attn(self.input_layernorm(hidden_BSE), positions_BS, mask_BS, cache)
        return hidden_BSE + self.mlp(self.post_attention_layernorm(hidden_BSE), cache)


class Decoder(nn.Module):
    """Embedding, layers and final norm, without the output head."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype, sequence_parallel: bool = False):
        super().__init__()
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            normal_init(config.initializer_range),
            dtype,
            pad=True,
            padding_idx=config.padding_idx,
            sequence_parallel_enabled=sequence_parallel,
            sequence_dimension=SEQUENCE,
        )
        numbers = range(config.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(config, dtype, sequence_parallel, number) for number in numbers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype, sequence_parallel)

    def forward(
        self,
        input_ids_BS: Tensor,
        positions_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        entered: list[Tensor] | None = None,
    ) -> Tensor:
        """Ids [B, S] -> final hidden states [B, S, E]. ``caches`` holds one entry per layer; ``entered`` gets what each
        layer is given."""
        hidden = self.embed_tokens(input_ids_BS)
        if positions_BS is None:
            positions_BS = sequence_positions(input_ids_BS)
        for i, layer in enumerate(self.layers):
            if entered is not None:
                entered.append(hidden)
            hidden = layer(hidden, positions_BS, mask_BS, None if caches is None else caches[i])
        return self.norm(hidden)


class CausalLM(CausalModel, ParallelBlock):
    """``sequence_parallel=None`` uses ``nxd_config["sequence_parallel"]`` inside ``initialize_parallel_model``."""

    config: LlamaConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: LlamaConfig, dtype: torch.dtype = torch.float32, sequence_parallel: bool | None = None):
        super().__init__(building_sequence_parallel() if sequence_parallel is None else sequence_parallel)
        self.config = config
        self.dtype = dtype
        self.model = Decoder(config, dtype, self.sequence_parallel_enabled)
        # A tied head is the embedding itself: it has no parameter, as in the checkpoints.
        self.lm_head = None
        self.model.embed_tokens.is_head = config.tied
        if not config.tied:
            axis = tensor_parallel_plan(config, self.context.tp.degree)["lm_head"].axis
            self.lm_head = first_linear(config, config.vocab_size, False, axis, dtype, shared=True)
        zero_biases(self)

    def auxiliary_loss(self, mask_BS: Tensor | None) -> Tensor | None:
        """Return the load balancing loss of a mixture with a factor for it."""
        mixture = self.config.mixture
        if mixture is None or not mixture.balance:
            return None
        blocks = [module for module in self.modules() if isinstance(module, Experts)]
        return mixture.balance * balancing_loss(blocks, mask_BS, self.context)

    @property
    def decoder(self) -> Decoder:
        return self.model

    def parallel_logits(self, hidden_BSE: Tensor) -> Tensor:
        hidden = self.enter(hidden_BSE)
        if self.lm_head is not None:
            return self.lm_head(hidden)
        return F.linear(hidden, cast(Tensor, self.model.embed_tokens.weight))
