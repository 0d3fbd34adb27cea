"""What modules return is captured and replaced by their names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nxd_infer import compat
from nxd_infer.modules.tensor_capture import (
    TensorCaptureConfig,
    TensorCaptureError,
    TensorReplacementRegister,
    disable_tensor_capture,
    enable_tensor_capture,
    get_available_modules,
    get_captured_tensors,
    get_captured_tensors_dict,
    register_tensor,
)

X = torch.arange(8.0).view(2, 4)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.up(x)
        register_tensor("twice", [y * 2])
        return x + y, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.norm(self.norm(x))


@pytest.fixture(autouse=True)
def _ended():
    yield
    disable_tensor_capture()


def hooked(model: nn.Module, path: str) -> list:
    """What a forward hook of one's own sees of a module."""
    seen: list = []
    model.get_submodule(path).register_forward_hook(lambda module, arguments, outputs: seen.append(outputs))
    return seen


def test_captured_tensors_are_those_that_hooks_see():
    model = Model()
    up, block, norm = (hooked(model, path) for path in ("layers.1.up", "layers.0", "norm"))
    expected = model(X)
    assert get_captured_tensors_dict() == {}
    assert enable_tensor_capture(model, ["layers.1.up", "layers.0", "norm"]) is model
    assert torch.equal(model(X), expected) and torch.equal(model(X + 1), model(X + 1))
    found = get_captured_tensors_dict()
    assert list(found) == ["twice", "layers.0.0", "layers.0.1", "layers.1.up", "twice@1", "norm", "norm@1"]
    wanted = {"layers.1.up": up[-1], "layers.0.0": block[-1][0], "layers.0.1": block[-1][1], "norm": norm[-2],
              "norm@1": norm[-1], "twice@1": up[-1] * 2}  # fmt: skip
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert len(get_captured_tensors()) == len(found)
    disable_tensor_capture(model)
    model(X)
    assert get_captured_tensors() == [] and not any(child._forward_pre_hooks for child in model.modules())


def test_limits_inputs_and_names_that_are_not_there():
    model = Model()
    enable_tensor_capture(model, TensorCaptureConfig(["layers.0.up"], max_intermediate_tensors=2, capture_inputs=True))
    model(X)
    found = get_captured_tensors_dict()
    assert list(found) == ["layers.0.up.inputs", "layers.0.up"] and torch.equal(found["layers.0.up.inputs"], X)
    with pytest.raises(TensorCaptureError, match=r"no module 'layers.0.upp'; the nearest is layers.0.up"):
        enable_tensor_capture(model, ["layers.0.upp"])
    assert "layers.1.up" in get_available_modules(model)


def test_the_old_names_are_these():
    compat.install()
    try:
        from neuronx_distributed.utils.tensor_capture import enable_tensor_capture as capture
        from neuronx_distributed.utils.tensor_replacement.registry import TensorReplacementRegister as register
    finally:
        compat.uninstall()
    assert capture is enable_tensor_capture and register is TensorReplacementRegister


def test_what_one_model_captured_replaces_what_another_computes():
    first, second = Model(), Model()
    with torch.no_grad():
        second.layers[0].up.weight.mul_(2)
    wanted = first(X)
    assert not torch.allclose(second(X), wanted)
    enable_tensor_capture(first, ["layers.0"])
    first(X)
    captured = get_captured_tensors_dict()
    register = TensorReplacementRegister(second, {"layers.0.0": captured["layers.0.0"].double()})
    assert torch.equal(second(X), wanted)  # so the first block is where they part
    register.tensors["layers.0.0"] = torch.zeros(2, 4)
    with torch.no_grad():
        x, _ = second.layers[1](torch.zeros(2, 4))
        assert torch.equal(second(X), second.norm(second.norm(x)))
    register.tensors["layers.0.0"] = torch.zeros(4, 2)
    with pytest.raises(TensorCaptureError, match=r"'layers.0.0' is \[2, 4\]: a tensor of \[4, 2\]"):
        second(X)
    register.remove()
    assert not torch.allclose(second(X), wanted) and not second.layers[0]._forward_hooks
    with pytest.raises(TensorCaptureError, match="no module 'nrm'; the nearest is norm"):
        TensorReplacementRegister(second, {"nrm": X})
