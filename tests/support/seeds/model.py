"""A small Llama as somebody writes it for neuronx_distributed, under the names that the documents use."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear
from neuronx_distributed.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from neuronx_distributed.parallel_layers.utils import divide
from torch import Tensor, nn


@dataclass
class Config:
    vocab_size: int = 24
    hidden_size: int = 16
    num_attention_heads: int = 4
    num_layers: int = 2


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class CoreAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_attention_heads
        self.num_heads = divide(config.num_attention_heads, get_tensor_model_parallel_size())
        self.norm = LlamaRMSNorm(size)
        self.qkv_proj = GQAQKVColumnParallelLinear(size, [size, size], bias=False, gather_output=False)
        self.core = CoreAttention()
        self.o_proj = RowParallelLinear(size, size, bias=False, input_is_parallel=True)
        self.up_proj = ColumnParallelLinear(size, 2 * size, gather_output=False)
        self.down_proj = RowParallelLinear(2 * size, size, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(self.norm(x)))
        x = x + self.o_proj(self.core(*heads).transpose(1, 2).flatten(-2))
        return x + self.down_proj(torch.relu(self.up_proj(x)))


class LlamaForCausalLM(nn.Module):
    name_or_path = "tiny"

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config) for _ in range(config.num_layers))
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, bias=False, gather_output=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None):
        """The loss of every next token (of ``input_ids`` unless there are labels), and this rank's logits."""
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(x)
        labels = input_ids if labels is None else labels
        return parallel_cross_entropy(logits[:, :-1], labels[:, 1:]).mean(), logits


def get_model(config: Config | None = None) -> LlamaForCausalLM:
    return LlamaForCausalLM(config or Config())


def tokens() -> Tensor:
    """A batch of two rows to learn."""
    return torch.arange(16).view(2, 8) % 11
