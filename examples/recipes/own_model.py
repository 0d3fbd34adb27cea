"""Train a model of your own with a recipe: python examples/recipes/own_model.py RECIPE.yaml [key=value ...]

The recipe's ``model.model_config`` is a config.json with ``"model_type": "tiny_gpt"``. A package would register the
family by an entry point instead (docs/models.md); then ``nxd-infer train RECIPE.yaml`` finds it on every rank.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from nxd_infer.context import current_context
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from nxd_infer.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_infer.parallel_layers.mappings import gather_from_tensor_model_parallel_region
from nxd_infer.recipes.loop import train
from nxd_infer.recipes.recipe import load
from nxd_models import registry
from nxd_models.hf.config_file import Count, ModelFile, SpecialTokens
from nxd_models.spec import DecoderConfig, ModelSpec, Task


class TinyFile(ModelFile, SpecialTokens):
    """The fields of config.json that the model reads; others are refused by name."""

    vocab_size: Count
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    intermediate_size: Count
    max_position_embeddings: Count = 512


def read_config(raw, origin="config.json") -> DecoderConfig:
    file = TinyFile.read(raw, origin)
    heads = file.num_attention_heads
    return DecoderConfig(
        model_type="tiny_gpt",
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        num_layers=file.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=file.hidden_size // heads,
        max_position=file.max_position_embeddings,
        bos_token_id=file.bos,
        eos_token_ids=file.eos,
    )


class Block(nn.Module):
    """Attention and an MLP; a block takes a hidden state [B, S, E] and returns one."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype):
        super().__init__()
        size, self.dim = config.hidden_size, config.head_dim
        self.norm, self.mlp_norm = nn.LayerNorm(size, dtype=dtype), nn.LayerNorm(size, dtype=dtype)
        columns = {"bias": False, "gather_output": False, "dtype": dtype}
        rows = {"bias": False, "input_is_parallel": True, "dtype": dtype}
        self.query, self.key, self.value = (ColumnParallelLinear(size, size, **columns) for _ in range(3))
        self.out = RowParallelLinear(size, size, **rows)
        self.up = ColumnParallelLinear(size, 4 * size, **columns)
        self.down = RowParallelLinear(4 * size, size, **rows)

    def forward(self, hidden, visible=None):
        x = self.norm(hidden)
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, visible, is_causal=visible is None)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class TinyGPT(nn.Module):
    """A causal language model with the ``forward`` that recipes call."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.context = config, current_context()
        self.tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, pad=True)
        self.places = nn.Embedding(config.max_position, config.hidden_size, dtype=dtype)
        self.blocks = nn.ModuleList(Block(config, dtype) for _ in range(config.num_layers))
        self.head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=False, dtype=dtype, pad=True
        )

    def forward(self, input_ids, attention_mask=None, labels=None, position_ids=None, num_items_in_batch=None):
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        visible = None
        if attention_mask is not None:  # tokens see earlier ones with their own number: documents of a packed row
            same = attention_mask[:, :, None] == attention_mask[:, None, :]
            visible = (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
        hidden = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            hidden = block(hidden, visible)
        logits = self.head(hidden)
        if labels is None:
            return gather_from_tensor_model_parallel_region(logits, context=self.context)[..., : self.config.vocab_size]
        wanted = F.pad(labels[:, 1:], (0, 1), value=-100)  # each token predicts the next one
        losses = parallel_cross_entropy(logits, wanted, vocab_size=self.config.vocab_size, context=self.context)
        count = (wanted != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return losses.sum() / count, logits


TINY = ModelSpec(
    model_types=("tiny_gpt",),
    read_config=read_config,
    tasks={"generate": Task(TinyGPT, TinyGPT, blocks="blocks")},  # the second is the serving step, once there is one
    adapter_targets=("query", "key", "value", "out", "up", "down"),
)

if __name__ == "__main__":
    registry.register(TINY)
    outcome = train(load(sys.argv[1], sys.argv[2:]))
    print(f"trained: {outcome.checkpoints}")
