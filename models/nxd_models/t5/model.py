"""The T5 family: an encoder and a decoder that attends to it. Parameters have their Hugging Face names. Parallel over
the context they are built in.

Shapes: B rows, S positions, T positions that are attended to, E hidden size, H heads of this rank, D head dimension,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import AxisPlan
from nxd_infer.ops import cache_attention, masked_cache_attention
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_models.layers import ACTIVATIONS, RMSNorm
from nxd_models.serving.kv_cache import LayerCache
from nxd_models.spec import Cut
from nxd_models.t5.config import T5Config


def tensor_parallel_plan(config: T5Config, degree: int) -> dict[str, Cut]:
    """Heads are not split; dimensions not divisible by ``degree`` are padded."""
    heads = AxisPlan.heads(config.num_heads, config.head_dim)
    inner, vocabulary = AxisPlan.padded(config.inner_size), AxisPlan.padded(config.vocab_size)
    attentions = ("encoder.block.*.layer.*.SelfAttention", "decoder.block.*.layer.*.SelfAttention")
    attentions = (*attentions, "decoder.block.*.layer.*.EncDecAttention")
    forwards = tuple(f"{stack}.block.*.layer.*.DenseReluDense" for stack in ("encoder", "decoder"))
    wider = ("wi_0", "wi_1") if config.gated else ("wi",)
    return {
        "shared": Cut(0, vocabulary),
        **{f"{attention}.{name}": Cut(0, heads) for attention in attentions for name in "qkv"},
        **{f"{attention}.o": Cut(1, heads) for attention in attentions},
        **{
            f"{attention}.relative_attention_bias": Cut(1, AxisPlan.padded(config.num_heads))
            for attention in attentions[:2]
        },
        **{f"{forward}.{name}": Cut(0, inner) for forward in forwards for name in wider},
        **{f"{forward}.wo": Cut(1, inner) for forward in forwards},
        **({} if config.scaled else {"lm_head": Cut(0, vocabulary)}),
    }


SCALE = 1.0
"""Scores are not scaled."""
Prompt = LayerCache | tuple[Tensor, Tensor]
"""What a decoder's block attends to: a cache whose ``start`` is the prompt's last position, or the encoder's states
[B, S, E] and what is added to scores."""


def _column(config: T5Config, plan: AxisPlan, dtype: torch.dtype) -> ColumnParallelLinear:
    return ColumnParallelLinear(
        config.hidden_size, plan.size, bias=False, gather_output=False, dtype=dtype, output_plan=plan
    )


def _row(config: T5Config, plan: AxisPlan, dtype: torch.dtype) -> RowParallelLinear:
    return RowParallelLinear(
        plan.size, config.hidden_size, bias=False, input_is_parallel=True, dtype=dtype, input_plan=plan
    )


def position_buckets(distance: Tensor, buckets: int, longest: int, *, both_ways: bool) -> Tensor:
    """Map how far a position lies ahead of another (int64, any shape) to its bucket.

    Near distances have a bucket each, farther ones share buckets of growing width. ``both_ways``: half of the buckets
    are for positions ahead; otherwise those are not seen, and their bucket means nothing.
    """
    if both_ways:
        buckets //= 2
        first = (distance > 0) * buckets
        distance = distance.abs()
    else:
        first = 0
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    growth = torch.log(distance.float().clamp(min=1) / exact) / math.log(longest / exact)
    far = (exact + (growth * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


class Attention(nn.Module):
    """Projections of one attention. ``biased``: with the table that makes scores depend on distances."""

    def __init__(self, config: T5Config, dtype: torch.dtype, *, biased: bool = False, both_ways: bool = False):
        super().__init__()
        heads = AxisPlan.heads(config.num_heads, config.head_dim)
        self.q, self.k, self.v = (_column(config, heads, dtype) for _ in range(3))
        self.o = _row(config, heads, dtype)
        self.head_dim = config.head_dim
        self.buckets, self.longest, self.both_ways = config.position_buckets, config.position_distance, both_ways
        if biased:
            self.relative_attention_bias = ParallelEmbedding(
                config.position_buckets,
                config.num_heads,
                dtype=dtype,
                shard_across_embedding=True,
                pad=True,
                collect_output=False,
            )

    def bias(self, here_BS: Tensor, there_T: Tensor) -> Tensor:
        """Return what is added to the scores between these positions: [B, H, S, T]."""
        buckets = position_buckets(there_T - here_BS[:, :, None], self.buckets, self.longest, both_ways=self.both_ways)
        return self.relative_attention_bias(buckets).permute(0, 3, 1, 2)

    def heads(self, x_BSF: Tensor) -> Tensor:
        """[B, S, H * D] -> [B, S, H, D]."""
        return x_BSF.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x_BSE: Tensor) -> tuple[Tensor, Tensor]:
        return self.heads(self.k(x_BSE)), self.heads(self.v(x_BSE))

    def forward(self, x_BSE: Tensor, seen_BTE: Tensor, bias_BHST: Tensor | None) -> Tensor:
        """Attend to the states ``seen``, without a cache."""
        q, k, v = (y.transpose(1, 2) for y in (self.heads(self.q(x_BSE)), *self.keys_values(seen_BTE)))
        return self._out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias_BHST, scale=SCALE).transpose(1, 2))

    def over_cache(self, x_BSE: Tensor, cache: LayerCache, bias_BHST: Tensor) -> Tensor:
        """Attend to the earlier positions of the cached sequences, and to these."""
        k, v = self.keys_values(x_BSE)
        q = self.heads(self.q(x_BSE))
        return self._out(masked_cache_attention(q, k, v, *cache, SCALE, bias_BHST=bias_BHST))

    def over_prompt(self, x_BSE: Tensor, cache: LayerCache) -> Tensor:
        """Attend to a whole prompt, whose last position is the cache's ``start``.

        Each query is a row of its own that writes that position's keys and values again, so that it sees all others.
        """
        q = self.heads(self.q(x_BSE))
        slot, count = cache.block_table[:, 0], q.shape[1]
        where = (cache.block_table, cache.start, cache.length)
        last = (states[slot, :, cache.start] for states in (cache.keys, cache.values))
        k, v, table, start, length = (x.repeat_interleave(count, 0) for x in (*last, *where))
        rows = cache_attention(
            q.flatten(0, 1)[:, None], k[:, None], v[:, None], cache.keys, cache.values, table, start, length, SCALE
        )
        return self._out(rows.unflatten(0, (-1, count))[:, :, 0])

    def _out(self, attended_BSHD: Tensor) -> Tensor:
        return self.o(attended_BSHD.flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: T5Config, dtype: torch.dtype):
        super().__init__()
        inner = AxisPlan.padded(config.inner_size)
        if config.gated:
            self.wi_0, self.wi_1 = _column(config, inner, dtype), _column(config, inner, dtype)
        else:
            self.wi = _column(config, inner, dtype)
        self.wo = _row(config, inner, dtype)
        self.gated, self.activation = config.gated, ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.wo(self.activation(self.wi_0(x)) * self.wi_1(x))
        return self.wo(self.activation(self.wi(x)))


class SelfLayer(nn.Module):
    def __init__(self, config: T5Config, dtype: torch.dtype, *, biased: bool, both_ways: bool):
        super().__init__()
        self.SelfAttention = Attention(config, dtype, biased=biased, both_ways=both_ways)
        self.layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def forward(self, x_BSE: Tensor, bias_BHST: Tensor, cache: LayerCache | None = None) -> Tensor:
        y = self.layer_norm(x_BSE)
        if cache is None:
            return x_BSE + self.SelfAttention(y, y, bias_BHST)
        return x_BSE + self.SelfAttention.over_cache(y, cache, bias_BHST)


class CrossLayer(nn.Module):
    def __init__(self, config: T5Config, dtype: torch.dtype):
        super().__init__()
        self.EncDecAttention = Attention(config, dtype)
        self.layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def forward(self, x_BSE: Tensor, prompt: Prompt) -> Tensor:
        y = self.layer_norm(x_BSE)
        if isinstance(prompt, LayerCache):
            return x_BSE + self.EncDecAttention.over_prompt(y, prompt)
        return x_BSE + self.EncDecAttention(y, *prompt)


class ForwardLayer(nn.Module):
    def __init__(self, config: T5Config, dtype: torch.dtype):
        super().__init__()
        self.DenseReluDense = FeedForward(config, dtype)
        self.layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.DenseReluDense(self.layer_norm(x))


class Block(nn.Module):
    """One block of a stack; that of a decoder attends to the prompt besides. ``first``: it has the stack's table."""

    nxd_repeats = True

    def __init__(self, config: T5Config, dtype: torch.dtype, *, first: bool, decodes: bool):
        super().__init__()
        cross = [CrossLayer(config, dtype)] if decodes else []
        own = SelfLayer(config, dtype, biased=first, both_ways=not decodes)
        self.layer = nn.ModuleList([own, *cross, ForwardLayer(config, dtype)])

    def forward(
        self, x_BSE: Tensor, bias_BHST: Tensor, cache: LayerCache | None = None, prompt: Prompt | None = None
    ) -> Tensor:
        own, *cross, forward = self.layer
        hidden = own(x_BSE, bias_BHST, cache)
        for layer in cross:
            hidden = layer(hidden, prompt)
        return forward(hidden)


class Stack(nn.Module):
    """The blocks and the final norm of the encoder, or of the decoder."""

    def __init__(self, config: T5Config, dtype: torch.dtype, layers: int, *, decodes: bool):
        super().__init__()
        self.block = nn.ModuleList(Block(config, dtype, first=i == 0, decodes=decodes) for i in range(layers))
        self.final_layer_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype)

    def layers_of(self, place: int) -> Iterator[nn.Module]:
        """Yield the layers at one place in every block."""
        return (cast(Block, block).layer[place] for block in self.block)

    def bias(self, here_BS: Tensor, there_T: Tensor) -> Tensor:
        return cast(SelfLayer, next(self.layers_of(0))).SelfAttention.bias(here_BS, there_T)

    def forward(
        self,
        x_BSE: Tensor,
        bias_BHST: Tensor,
        caches: Sequence[LayerCache] | None = None,
        prompts: Sequence[Prompt] | None = None,
    ) -> Tensor:
        """``caches`` and ``prompts`` have one entry per block."""
        for i, block in enumerate(self.block):
            x_BSE = block(
                x_BSE, bias_BHST, None if caches is None else caches[i], None if prompts is None else prompts[i]
            )
        return self.final_layer_norm(x_BSE)


class ConditionalGeneration(nn.Module):
    """Encoder, decoder and output head. ``config`` and ``context`` are those it was built with."""

    def __init__(self, config: T5Config, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.context = config, current_context()
        self.shared = ParallelEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, pad=True)
        self.encoder = Stack(config, dtype, config.encoder_layers, decodes=False)
        self.decoder = Stack(config, dtype, config.num_layers, decodes=True)
        # A head that is the embedding has no parameter, as in the checkpoints.
        self.shared.is_head = config.scaled
        self.lm_head = None if config.scaled else _column(config, AxisPlan.padded(config.vocab_size), dtype)

    def encode(self, ids_BS: Tensor, length_B: Tensor) -> Tensor:
        """Map prompts of these lengths to their states [B, S, E]; those after a prompt's end mean nothing."""
        at_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
        bias = self.encoder.bias(at_S[None], at_S)
        return self.encoder(self.shared(ids_BS), _hidden_from(bias, at_S < length_B[:, None]))

    def keys_values(self, prompt_BSE: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what each block of the decoder attends to in a prompt: keys and values [B, S, H, D]."""
        for layer in self.decoder.layers_of(1):
            yield cast(CrossLayer, layer).EncDecAttention.keys_values(prompt_BSE)

    def decode(
        self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache], prompts: Sequence[LayerCache]
    ) -> Tensor:
        """Map the answers' ids at these positions of the cached sequences to final hidden states [B, S, E]."""
        past = torch.arange(caches[0].keys.shape[2], device=ids_BS.device)
        return self.decoder(self.shared(ids_BS), self.decoder.bias(positions_BS, past), caches, prompts)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map final hidden states [..., E] to logits [..., V], complete on every rank."""
        if self.lm_head is not None:
            parallel = self.lm_head(hidden)
        else:
            entered = mappings.copy_to_tensor_model_parallel_region(hidden, context=self.context)
            parallel = F.linear(entered * self.config.hidden_size**-0.5, self.shared.weight)
        whole = mappings.gather_from_tensor_model_parallel_region(parallel, context=self.context)
        return whole.narrow(-1, 0, self.config.vocab_size)

    def forward(
        self, input_ids: Tensor, decoder_input_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, T, V] of the answers ``decoder_input_ids`` [B, T] to the prompts ``input_ids`` [B, S].

        ``attention_mask`` [B, S] is 1 for a prompt's tokens and 0 for the padding behind. Without answers the decoder
        reads the prompts.
        """
        answers = input_ids if decoder_input_ids is None else decoder_input_ids
        count = (
            torch.full_like(input_ids[:, 0], input_ids.shape[1]) if attention_mask is None else attention_mask.sum(1)
        )
        prompt = self.encode(input_ids, count)
        seen = torch.arange(input_ids.shape[1], device=input_ids.device) < count[:, None]
        whole = _hidden_from(torch.zeros_like(prompt[:, None, :1, :1]), seen)
        at_T = torch.arange(answers.shape[1], device=answers.device)
        bias = self.decoder.bias(at_T[None], at_T)
        bias = bias.masked_fill(at_T > at_T[:, None], torch.finfo(bias.dtype).min)
        hidden = self.decoder(self.shared(answers), bias, None, [(prompt, whole)] * self.config.num_layers)
        return self.logits(hidden)


def _hidden_from(bias_BHST: Tensor, seen_BT: Tensor) -> Tensor:
    """Return the bias with which no query attends to the positions that are not ``seen``."""
    return torch.where(seen_BT[:, None, None], bias_BHST, torch.finfo(bias_BHST.dtype).min)
