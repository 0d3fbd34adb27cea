"""The two architectures of EAGLE heads. Both read pairs: a token, and the target's hidden state of the token before it.

EAGLE (1 and 2) mixes the embedding and the target's last hidden state by ``fc``, runs a decoder layer without its first
norm, and ends in the target's output layer: what it returns is a guess of the target's next hidden state. EAGLE-3 makes
one state of three of the target's layers by ``fc``; queries, keys and values read it and the embedding side by side;
and it has a norm and an output layer of its own, over a part of the vocabulary. For guesses beyond the next one a head
is given its own last state in place of the target's.

Sources: Li, Wei, Zhang and Zhang, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024, and
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025.

Shapes: B rows, S positions, E hidden size, F numbers that the target gives for a token, V vocabulary, W its part that
is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ModelConfigError
from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.layers import ParallelEmbedding
from nxd_models.eagle.config import EagleConfig
from nxd_models.layers import SEQUENCE, ParallelBlock, RMSNorm, first_linear, last_linear, normal_init, zero_biases
from nxd_models.llama.model import Attention, DecoderLayer, FeedForward, tensor_parallel_plan
from nxd_models.serving.decoder_step import DecoderStep
from nxd_models.serving.kv_cache import LayerCache


class MidLayer(nn.Module):
    """EAGLE-3's block: attention reads the embedding and the hidden state, each normalised, side by side."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype):
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps, dtype), RMSNorm(size, eps, dtype)
        self.self_attn = Attention(replace(config, hidden_size=2 * size), dtype)
        heads = tensor_parallel_plan(config, current_context().tp.degree)["model.layers.*.self_attn.o_proj"].axis
        inputs = config.num_heads * config.head_dim
        self.self_attn.o_proj = last_linear(config, inputs, config.output_bias, heads, dtype)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype)
        self.mlp = FeedForward(config, dtype)

    def forward(self, embedded_BSE: Tensor, hidden_BSE: Tensor, positions_BS: Tensor, cache: LayerCache) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded_BSE), self.hidden_norm(hidden_BSE)), -1)
        hidden_BSE = hidden_BSE + self.self_attn(both, positions_BS, None, cache)
        return hidden_BSE + self.mlp(self.post_attention_layernorm(hidden_BSE))


class EagleHead(ParallelBlock):
    """A head, parallel over the current context. Its parameters have their names in the checkpoints."""

    config: EagleConfig
    d2t: Tensor
    """int64 [W]: what is to be added to the number of a guess to get the token."""

    def __init__(self, config: EagleConfig, dtype: torch.dtype = torch.float32):
        super().__init__(False)
        self.config, self.dtype = config, dtype
        size, init = config.hidden_size, normal_init(config.initializer_range)
        self.embed_tokens = ParallelEmbedding(
            config.vocab_size, size, init, dtype, pad=True, padding_idx=config.padding_idx, sequence_dimension=SEQUENCE
        )
        self.mixes_layers = config.kind == "eagle3"
        self.fc = nn.Linear(config.features if self.mixes_layers else 2 * size, size, config.fc_bias, dtype=dtype)
        if self.mixes_layers:
            self.midlayer = MidLayer(config, dtype)
            self.norm = RMSNorm(size, config.norm_eps, dtype)
        else:
            self.layers = nn.ModuleList(DecoderLayer(config, dtype, number=i) for i in range(config.num_layers))
            self.layers[0].input_layernorm = nn.Identity()
        guessed = config.draft_vocab_size
        self.lm_head = first_linear(config, guessed, False, AxisPlan.padded(guessed), dtype, shared=True)
        if guessed < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(guessed, dtype=torch.int64))
        zero_biases(self)

    def given(self, features_BSF: Tensor) -> Tensor:
        """Map what the target gives to states as the head's own are: [B, S, E]."""
        features = features_BSF.to(self.dtype)
        return self.fc(features) if self.mixes_layers else features

    def own(self, ids_BS: Tensor, hidden_BSE: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Map tokens, and the states before each of them, to states of the head, [B, S, E]."""
        embedded = self.embed_tokens(ids_BS)
        if self.mixes_layers:
            return self.midlayer(embedded, hidden_BSE, positions_BS, caches[0])
        hidden = self.fc(torch.cat((embedded, hidden_BSE), -1))
        for layer, cache in zip(self.layers, caches, strict=True):
            hidden = layer(hidden, positions_BS, None, cache)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Map states [..., E] to logits of the target's tokens [..., V], complete on every rank."""
        if self.mixes_layers:
            hidden = self.norm(hidden)
        parts = self.lm_head(self.enter(hidden))
        guessed = self.config.draft_vocab_size
        logits = mappings.gather_from_tensor_model_parallel_region(parts, context=self.context).narrow(-1, 0, guessed)
        if guessed == self.config.vocab_size:
            return logits
        everything = logits.new_full((*logits.shape[:-1], self.config.vocab_size), float("-inf"))
        return everything.index_copy(-1, torch.arange(guessed, device=logits.device) + self.d2t, logits)


class EagleStep(DecoderStep, EagleHead):
    """One step of a head, which takes two more inputs.

    ``hidden`` [B, S, F] float32 is what the target gave for the token before each of ``tokens``; where these are -1
    (the slot's last guess), it is ignored in favour of the slot's last state, so that a chain of guesses needs nothing
    from outside. ``ahead`` [B] int64: how much further a token's place in the text is than its position in the cache,
    by which the sampler draws as the target does.
    """

    nxd_equal_ranks = True
    last_hidden: Tensor

    def __init__(self, config: EagleConfig, dtype: torch.dtype = torch.float32, **options: Any):
        super().__init__(config, dtype, **options)
        if current_context().pp.degree > 1:
            raise ModelConfigError("head_of: a head has no pipeline stages; trace it with pp_degree = 1")
        self.nxd_inputs |= {"hidden": {"role": "hidden"}, "ahead": {"role": "ahead", "default": 0}}
        last = torch.zeros(self.slots + 1, config.hidden_size, dtype=dtype)
        self.register_buffer("last_hidden", last, persistent=False)

    @property
    def nxd_states(self) -> list[str]:
        return [*super().nxd_states, "last_hidden"]

    def states(
        self, ids_BS: Tensor, positions_BS: Tensor, caches: Sequence[LayerCache], *own: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        hidden_BSF, guessed_BS, slot_B, end_B = own
        last_B1E = self.last_hidden.index_select(0, slot_B)[:, None]
        hidden = torch.where(guessed_BS[..., None], last_B1E, self.given(hidden_BSF))
        states = self.own(ids_BS, hidden, positions_BS, caches)
        end = end_B[:, None, None].expand(-1, 1, states.shape[-1])
        torch.ops.aten.index_put_(self.last_hidden, [slot_B], states.gather(1, end)[:, 0])
        return states, None
