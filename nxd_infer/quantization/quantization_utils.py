"""Quantized checkpoints: of a model before it is split, or of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.quantization.arithmetic import absolute_maximum, quantized, scale_for
from nxd_infer.quantization.dequantize import scale_dequantize
from nxd_infer.quantization.quantization_config import checked
from nxd_infer.quantization.quantize import convert, named_in

Model = TypeVar("Model", nn.Module, dict[str, Tensor])
_PACKED = "._packed_params"


class QuantizedLinear(nn.Module):
    """``nn.Linear`` with a quantized weight, and names in its state dict as quantized parallel layers have them."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = bias
        self.dtype = dtype

    @classmethod
    def from_float(cls, mod: nn.Linear, q_config: Mapping[str, Any] | None = None) -> QuantizedLinear:
        return cls(*_parts(mod.weight, q_config or {}), mod.bias, mod.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, scale_dequantize(self.weight, self.scale, self.dtype), self.bias)


def quantize_pytorch_model_per_channel_symmetric(
    float_model: Model,
    inplace: bool = False,
    dtype: torch.dtype = torch.int8,
    modules_to_not_convert: Sequence[str] | None = None,
) -> Model:
    """Quantize every ``nn.Linear`` of a model with a scale for each output; its state dict is the checkpoint.

    ``float_model``: a model, or the state dict of one: then every matrix ``*.weight`` is one of a linear layer, but
    for those of ``modules_to_not_convert`` (name the embeddings there).

    The checkpoint has ``weight`` in ``dtype`` (int8 or a float8), and ``scale`` in float32 ``[outputs, 1]``.
    """
    return _quantize_all(float_model, inplace, dtype, modules_to_not_convert, 0)


def quantize_pytorch_model_per_tensor_symmetric(
    float_model: Model,
    inplace: bool = False,
    dtype: torch.dtype = torch.int8,
    modules_to_not_convert: Sequence[str] | None = None,
) -> Model:
    """:func:`quantize_pytorch_model_per_channel_symmetric` with one scale for each weight, ``[1]``."""
    return _quantize_all(float_model, inplace, dtype, modules_to_not_convert, None)


def _quantize_all(model: Any, inplace: bool, dtype: torch.dtype, skipped: Sequence[str] | None, axis: Any) -> Any:
    kind = "per_tensor_symmetric" if axis is None else "per_channel_symmetric"
    config = {"quantization_type": kind, "quantized_dtype": dtype}
    if isinstance(model, nn.Module):
        return convert(model, config, inplace, {nn.Linear: QuantizedLinear}, skipped)
    result = model if inplace else dict(model)
    for name, value in list(model.items()):
        path = name.removesuffix(".weight")
        if path != name and value.dim() == 2 and value.is_floating_point() and not named_in(path, skipped or ()):
            result[name], result[f"{path}.scale"] = _parts(value, config)
    return result


@torch.no_grad()
def _parts(weight: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    values = checked(config)
    dtype = values["quantized_dtype"].value
    scale = scale_for(absolute_maximum(weight, values["quantization_per_channel_axis"]), dtype)
    return quantized(weight, scale, dtype), scale


def convert_qint8_to_int8_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Change the state dict of a model that torch quantized, in place, and return it: packed weights (qint8) become
    ``weight`` (int8), ``scale`` and ``bias``, as this package quantizes. Others stay."""
    for name in [name for name in state_dict if name.endswith(f"{_PACKED}.dtype")]:
        layer = name.removesuffix(f"{_PACKED}.dtype")
        del state_dict[name]
        for other in ("scale", "zero_point"):  # of activations
            state_dict.pop(f"{layer}.{other}", None)
        state_dict[f"{layer}.weight"], bias = state_dict.pop(f"{layer}{_PACKED}{_PACKED}")
        if bias is not None:
            state_dict[f"{layer}.bias"] = bias
    for name, value in list(state_dict.items()):
        if isinstance(value, Tensor) and value.dtype is torch.qint8:
            state_dict[name] = value.int_repr()
            state_dict[f"{name.removesuffix('weight')}scale"] = _scale_of(value)
    return state_dict


def _scale_of(weight: Tensor) -> Tensor:
    if weight.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.tensor([weight.q_scale()])
    shape = [1] * weight.dim()
    shape[weight.q_per_channel_axis()] = -1
    return weight.q_per_channel_scales().float().reshape(shape)
