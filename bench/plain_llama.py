"""The Llama of the training benchmark in plain PyTorch: what DTensor, FSDP2, DDP and one process train.

It computes the same as ``nxd_models.llama.model``, with the same names, using ``nn.Linear`` and ``nn.Embedding``, which
PyTorch's tensor parallelism can split. Shapes: B rows, S positions, E hidden size, H heads, D head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_models.llama.config import LlamaConfig
from nxd_models.rope import rotate


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """Causal attention over the heads of the projections: all of them, or a rank's."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)

    def forward(self, x_BSE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x_BSE.shape
        q, k, v = (linear(x_BSE).view(B, S, -1, self.head_dim) for linear in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(B, S, -1))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        dim = config.head_dim
        frequencies = config.rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, input_ids_BS: Tensor) -> Tensor:
        angles_SF = torch.arange(input_ids_BS.shape[1])[:, None] * self.frequencies
        cos, sin = angles_SF.cos()[None, :, None], angles_SF.sin()[None, :, None]
        x = self.embed_tokens(input_ids_BS)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class PlainLlama(nn.Module):
    """``forward(input_ids [B, S])`` returns the mean loss of the next tokens."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits = self.lm_head(self.model(input_ids))
        wanted = F.pad(input_ids[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-100)
