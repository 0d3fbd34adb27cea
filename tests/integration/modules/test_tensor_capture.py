"""Captured tensors as outputs of a traced model, and replaced ones in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nxd_infer as nxd
from nxd_infer.modules.tensor_capture import (
    TensorReplacementRegister,
    disable_tensor_capture,
    enable_tensor_capture,
    get_captured_tensors_dict,
)
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear

X = torch.linspace(-1, 1, 8).view(2, 4)
NAMES = ["layers.1.down", "layers.2", "norm"]


class Block(nn.Module):
    nxd_repeats = True

    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(4, 8, gather_output=False)
        self.down = RowParallelLinear(8, 4, input_is_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def capturing() -> tuple[nn.Module, dict]:
    return enable_tensor_capture(Model(), NAMES, returned=True), {}


def replacing() -> tuple[nn.Module, dict]:
    model, _ = capturing()
    TensorReplacementRegister(model, {"layers.1.down": X})
    return model, {}


@pytest.mark.parametrize("build", [capturing, pytest.param(replacing, marks=pytest.mark.smoke)])
def test_a_traced_model_returns_what_eager_modules_do(build):
    model, _ = build()
    expected, captured = model(X)
    assert list(captured) == NAMES and captured.keys() == get_captured_tensors_dict().keys()
    disable_tensor_capture()
    with nxd.trace.parallel_model_trace(build, X, tp_degree=2) as traced:
        outputs, found = traced(X)
    torch.testing.assert_close(outputs, expected)
    assert found.keys() == captured.keys()
    for name in captured:
        torch.testing.assert_close(found[name], captured[name])
    if build is replacing:
        assert torch.equal(found["layers.1.down"], X)
    else:
        torch.testing.assert_close(Model()(X), outputs)
