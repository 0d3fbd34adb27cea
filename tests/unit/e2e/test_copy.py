"""A module of layers can be copied before it is traced."""

from __future__ import annotations

import copy

import torch

from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear


def test_a_copy_computes_the_same():
    torch.manual_seed(0)
    up, down = ColumnParallelLinear(8, 16, gather_output=False), RowParallelLinear(16, 8, input_is_parallel=True)
    layers, x = torch.nn.Sequential(up, torch.nn.ReLU(), down), torch.randn(2, 8)
    assert torch.equal(copy.deepcopy(layers)(x), layers(x))
