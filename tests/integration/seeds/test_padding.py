"""Padding attention heads, as the API reference shows it: the attention it modifies, and its three calls."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from nxd_infer import compat

compat.install()

from neuronx_distributed import parallel_layers
from neuronx_distributed.parallel_layers import utils as neuronx_dist_utils
from neuronx_distributed.parallel_layers.pad import get_number_of_extra_heads, pad_model
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size

from tests.support.seeds.degrees import alone, at_degree


class MyAttention(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = config.hidden // config.num_heads
        self.split_size = config.hidden
        self.qkv = nn.ModuleList(
            parallel_layers.ColumnParallelLinear(config.hidden, config.hidden, gather_output=False) for _ in range(3)
        )
        self.out = parallel_layers.RowParallelLinear(config.hidden, config.hidden, input_is_parallel=True)
        self.num_heads = neuronx_dist_utils.divide(
            self.num_heads + get_number_of_extra_heads(self.num_heads, get_tensor_model_parallel_size()),
            get_tensor_model_parallel_size(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for layer in self.qkv)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class MyModel(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.attention = MyAttention(config)
        self.mlp_up = parallel_layers.ColumnParallelLinear(config.hidden, 20, gather_output=False)
        self.mlp_down = parallel_layers.RowParallelLinear(20, config.hidden, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp_down(torch.relu(self.mlp_up(x)))


def get_model(config: SimpleNamespace) -> MyModel:
    torch.manual_seed(0)
    return MyModel(config)


def pad_calls() -> list[torch.Tensor]:
    desired_config = SimpleNamespace(hidden=12, num_heads=3)
    degree = get_tensor_model_parallel_size()
    torch.manual_seed(1)
    x, outputs = torch.randn(2, 5, 12), []

    def my_hook(attention_to_pad, tgt_src_ratio):
        attention_to_pad.split_size = int(attention_to_pad.split_size * tgt_src_ratio)

    wrapped = {"wrapped_classes": [MyAttention]}
    for options in ({}, wrapped, {**wrapped, "pad_hook_fn": my_hook}):
        model = get_model(config=desired_config)
        model = pad_model(model, tp_degree=degree, n_heads=desired_config.num_heads, **options)
        outputs.append(model(x).detach())
    assert model.attention.split_size == 12 * (3 + get_number_of_extra_heads(3, degree)) // 3
    return outputs


def test_pad_model():
    """Three heads on two ranks; padding changes no result."""
    expected = alone(pad_calls)[0]
    for outputs in at_degree(2, pad_calls):
        for y in outputs:
            assert (y - expected).abs().max() / expected.abs().max() < 1e-5
