"""Quantized checkpoints: of a model before it is split, or of its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.quantization.dequantize import absolute_maximum, quantized, scale_dequantize, scale_for
from nxd_infer.quantization.quantization_config import QuantizationType, scheme
from nxd_infer.quantization.quantize import convert, named_in


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


def _quantize_all(
    kind: QuantizationType,
    float_model: Any,
    inplace: bool = False,
    dtype: torch.dtype = torch.int8,
    modules_to_not_convert: Sequence[str] | None = None,
) -> Any:
    """Quantize every ``nn.Linear`` of a model; its state dict is the checkpoint for converted parallel layers.

    ``float_model``: a model, or the state dict of one: then every matrix ``*.weight`` is taken for that of a linear
    layer, but for those of ``modules_to_not_convert`` (name the embeddings there).

    The checkpoint has ``weight`` in ``dtype`` (int8 or a float8), and ``scale`` in float32.
    """
    config, skipped = {"quantization_type": kind, "quantized_dtype": dtype}, modules_to_not_convert or ()
    if isinstance(float_model, nn.Module):
        return convert(float_model, config, inplace, {nn.Linear: QuantizedLinear}, skipped)
    result = float_model if inplace else dict(float_model)
    for name, value in list(float_model.items()):
        path = name.removesuffix(".weight")
        if path != name and value.dim() == 2 and value.is_floating_point() and not named_in(path, skipped):
            result[name], result[f"{path}.scale"] = _parts(value, config)
    return result


quantize_pytorch_model_per_channel_symmetric = partial(_quantize_all, QuantizationType.PER_CHANNEL_SYMMETRIC)
"""With a scale for each output, ``[outputs, 1]``."""
quantize_pytorch_model_per_tensor_symmetric = partial(_quantize_all, QuantizationType.PER_TENSOR_SYMMETRIC)
"""With one scale for each weight, ``[1]``."""


@torch.no_grad()
def _parts(weight: Tensor, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    dtype, channels = scheme(config, weight.dim())
    scale = scale_for(absolute_maximum(weight, channels), dtype.value)
    return quantized(weight, scale, dtype.value), scale


def convert_qint8_to_int8_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` as it is: what this package quantizes is int8 already."""
    return state_dict
