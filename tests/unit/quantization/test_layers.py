"""Quantized layers at degree 1 against float ones and against torch's own arithmetic of quantized tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_infer.ops.packed import quantize as packed_quantize
from nxd_infer.parallel_layers import ColumnParallelLinear, RowParallelLinear
from nxd_infer.quantization.dequantize import absolute_maximum, quantized, scale_for
from nxd_infer.quantization.quantization_config import (
    QuantizationType,
    QuantizedDtype,
    get_default_custom_qconfig_dict,
    get_default_expert_wise_per_channel_custom_qconfig_dict,
    get_default_per_channel_custom_qconfig_dict,
)
from nxd_infer.quantization.quantization_layers import QuantizedColumnParallel, QuantizedRowParallel
from nxd_infer.quantization.quantization_utils import (
    convert_qint8_to_int8_state_dict,
    quantize_pytorch_model_per_channel_symmetric,
    quantize_pytorch_model_per_tensor_symmetric,
)
from nxd_infer.quantization.quantize import convert

PER_CHANNEL = QuantizationType.PER_CHANNEL_SYMMETRIC


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8, bias=False)
        self.lm_head = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.lm_head(x + self.down(F.silu(self.up(x))))


class Parallel(Plain):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear(8, 24, gather_output=False)
        self.down = RowParallelLinear(24, 8, bias=False, input_is_parallel=True)
        self.lm_head = ColumnParallelLinear(8, 11)


IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("dtype", list(QuantizedDtype))
def test_quantized_values_are_torchs(axis, dtype):
    torch.manual_seed(0)
    weight = torch.randn(300, 70) * torch.rand(300, 1) ** 4
    weight[3] = 0
    scale = scale_for(absolute_maximum(weight, () if axis is None else (axis,)), dtype.value)
    ours = quantized(weight, scale, dtype.value)
    if dtype is not QuantizedDtype.INT8:
        assert torch.equal(ours, (weight / scale).to(dtype.value))
    elif axis is None:
        assert torch.equal(ours, torch.quantize_per_tensor(weight, scale.item(), 0, torch.qint8).int_repr())
    else:
        zero = torch.zeros(scale.numel(), dtype=torch.int64)
        theirs = torch.quantize_per_channel(weight, scale.flatten(), zero, axis, torch.qint8)
        assert torch.equal(ours, theirs.int_repr())
    if axis == 0 and dtype is QuantizedDtype.INT8:  # what the CPU's backend rounds to
        assert torch.equal(ours, packed_quantize(weight)[0])


@pytest.mark.parametrize("quantize, config", [
    (quantize_pytorch_model_per_channel_symmetric, get_default_per_channel_custom_qconfig_dict()),
    (quantize_pytorch_model_per_tensor_symmetric, get_default_custom_qconfig_dict()),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [QuantizedDtype.INT8, QuantizedDtype.F8E4M3])
def test_a_quantized_checkpoint_loads_into_the_converted_model(tmp_path, quantize, config, dtype):
    torch.manual_seed(0)
    plain = Plain()
    expected = plain(IDS)
    skipped = ["lm_head", "embed"]
    model = quantize(plain, dtype=dtype.value, modules_to_not_convert=skipped)
    assert torch.equal(plain(IDS), expected) and isinstance(plain.up, nn.Linear)
    state = convert_qint8_to_int8_state_dict(model.state_dict())
    assert state["up.weight"].dtype is dtype.value and state["lm_head.weight"].dtype is torch.float32
    assert state["up.scale"].shape == ((24, 1) if quantize is quantize_pytorch_model_per_channel_symmetric else (1,))
    of_dict = quantize(plain.state_dict(), dtype=dtype.value, modules_to_not_convert=skipped)
    assert state.keys() == of_dict.keys()
    assert all(torch.equal(state[name].float(), of_dict[name].float()) for name in state)

    save_file(state, tmp_path / "model.safetensors")
    ours = convert(Parallel(), {**config, "quantized_dtype": dtype}, modules_to_not_convert=["lm_head"])
    assert isinstance(ours.up, QuantizedColumnParallel) and type(ours.lm_head) is ColumnParallelLinear
    with pytest.raises(RuntimeError, match=r"up\.scale"):
        ours.load_state_dict(plain.state_dict())
    ours.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(ours(IDS), model(IDS))
    # Half a step of each weight, through both layers.
    assert (ours(IDS) - expected).abs().max() < (0.02 if dtype is QuantizedDtype.INT8 else 0.1)


def test_a_layer_is_drawn_as_the_float_one_is_and_keeps_its_scales_in_any_dtype():
    torch.manual_seed(0)
    plain = RowParallelLinear(16, 8)
    torch.manual_seed(0)
    drawn = QuantizedRowParallel(16, 8, quantization_type=PER_CHANNEL)
    made = QuantizedRowParallel.from_float(plain, get_default_per_channel_custom_qconfig_dict())
    for name, value in made.state_dict().items():
        assert torch.equal(value, drawn.state_dict()[name])
    assert plain.weight.dtype is torch.float32 and not hasattr(plain, "scale")
    torch.manual_seed(0)
    drawn.reset_parameters()
    assert torch.equal(drawn.weight, made.weight)
    x = torch.randn(2, 16, requires_grad=True)
    drawn(x).sum().backward()
    torch.testing.assert_close(x.grad, drawn._matrix().sum(0).expand(2, 16))
    assert drawn.weight.grad is None and drawn.bias.grad is not None

    scale = made.scale.clone()
    made.to(torch.bfloat16)
    assert made(x.detach().bfloat16()).dtype is torch.bfloat16
    assert made.weight.dtype is torch.int8 and torch.equal(made.scale, scale)
    made.to("meta").to_empty(device="cpu")
    assert made.weight.dtype is torch.int8 and made.scale.dtype is torch.float32


def test_what_a_layer_cannot_have_is_refused():
    linear = ColumnParallelLinear(4, 4)
    for config, word in (
        ({"quantization_per_channel_axis": 2, "quantization_type": PER_CHANNEL}, "axis=2"),
        ({"quantized_dtype": torch.int4}, "QuantizedDtype"),
        ({"activation_quantization_type": "dynamic"}, "'activation_quantization_type': 'dynamic'"),
    ):
        with pytest.raises(ParallelConfigError, match=word):
            QuantizedColumnParallel.from_float(linear, config)
    with pytest.raises(ParallelConfigError, match="made of a RowParallelLinear, got ColumnParallelLinear"):
        QuantizedRowParallel.from_float(linear)
    assert convert(linear, {"activation_quantization_type": None}).scale.shape == (1,)
    assert QuantizedColumnParallel(input_size=4, output_size=5, dtype=torch.bfloat16).bias.dtype is torch.bfloat16
    with pytest.raises(ParallelConfigError, match="2 sizes, and all else by keyword"):
        QuantizedColumnParallel(4, 5, PER_CHANNEL)


def test_experts_have_scales_of_their_own():
    torch.manual_seed(0)
    plain = ExpertFusedColumnParallelLinear(3, 8, 6, bias=True)
    config = get_default_expert_wise_per_channel_custom_qconfig_dict()
    made = convert(nn.Sequential(plain, ExpertFusedRowParallelLinear(3, 6, 8)), config)
    assert [layer.scale.shape for layer in made] == [(3, 1, 6), (3, 1, 8)]
    for expert in range(3):
        q, scale = packed_quantize(plain.weight[expert].T)
        assert torch.equal(made[0].weight[expert], q.T) and torch.equal(made[0].scale[expert, 0], scale)
    x, chosen = torch.randn(4, 8), torch.tensor([2, 0, -1, 2])
    error = (made[0](x, chosen) - plain(x, chosen)).abs().max()
    assert 0 < error < 8 * x.abs().max() * made[0].scale.max() / 2
    assert convert(ColumnParallelLinear(4, 5), config).scale.shape == (5, 1)
