"""Parallel linear layers with a weight in 8 bits: ``weight`` (int8 or float8) and ``scale`` (float32).

Scales are shaped like the weight with every dimension 1 but the channels' (``[outputs, 1]``), or ``[1]`` for a whole
weight. They are split where their dimension is: a column-parallel layer's with its rows, while each rank of a
row-parallel layer has those of all outputs. Forward multiplies the weight out in float32 and rounds it to ``dtype``; it
is not trained, but inputs and bias have their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan, layout_of
from nxd_infer.parallel_layers.base import DeviceLike, WeightAndBias
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_infer.quantization.arithmetic import absolute_maximum, quantized, scale_for
from nxd_infer.quantization.dequantize import scale_dequantize
from nxd_infer.quantization.quantization_config import (
    QuantizationType,
    QuantizedDtype,
    checked,
    get_default_custom_qconfig_dict,
)

Self = TypeVar("Self", bound="BaseQuantizeParallelLinear")


class BaseQuantizeParallelLinear(WeightAndBias):
    """What the layers share; it comes before the float layer among the bases, whose weight it quantizes."""

    scale: nn.Parameter
    dequantized_dtype: torch.dtype

    def _set(self, config: Mapping[str, Any]) -> None:
        values = checked(config)
        if values["quantization_type"] is QuantizationType.EXPERT_WISE_PER_CHANNEL_SYMMETRIC:
            raise ParallelConfigError(
                f"{type(self).__name__} has no experts: take QuantizationType.PER_CHANNEL_SYMMETRIC"
            )
        axis = values["quantization_per_channel_axis"]
        if axis not in (None, -2, -1, 0, 1):
            raise ParallelConfigError(f"quantization_per_channel_axis={axis!r} must be 0 (outputs) or 1 (inputs)")
        self.quantization_type = values["quantization_type"]
        self.quantized_dtype: QuantizedDtype = values["quantized_dtype"]
        self.quantization_per_channel_axis = None if axis is None else axis % 2

    @classmethod
    def from_float(cls: type[Self], mod: nn.Module, q_config: Mapping[str, Any] | None = None) -> Self:
        """Return the quantized layer of a float one, which stays as it is. At degrees above 1 every rank calls it.

        A weight on the meta device stays there, for a checkpoint to fill. Raises ParallelConfigError for a layer of
        another class, or a ``q_config`` that the layer cannot have.
        """
        if not isinstance(mod, cls.__bases__[1]):
            raise ParallelConfigError(
                f"{cls.__name__} is made of a {cls.__bases__[1].__name__}, got {type(mod).__name__}"
            )
        layer = cls.__new__(cls)
        own = vars(mod).items()
        vars(layer).update({name: dict(value) if isinstance(value, dict) else value for name, value in own})
        layer._set(get_default_custom_qconfig_dict() if q_config is None else q_config)
        layer._quantize()
        return layer

    def reset_parameters(self) -> None:
        if self.weight.dtype is self.quantized_dtype.value:
            self._replace("weight", torch.empty_like(self.weight, dtype=self.dequantized_dtype))
        super().reset_parameters()
        self._quantize()

    @torch.no_grad()
    def _quantize(self) -> None:
        weight, axis, dtype = self.weight, self.quantization_per_channel_axis, self.quantized_dtype.value
        self.dequantized_dtype = weight.dtype
        maximum = absolute_maximum(weight, axis)
        layout = layout_of(self, "weight")
        if layout is not None and layout.partition_dim != axis:  # the scale is that of the logical weight
            maximum = comm.all_reduce(maximum, self.context, self.axis, "max")
        scale = scale_for(maximum, dtype)
        for name, value in (("weight", quantized(weight, scale, dtype)), ("scale", scale)):
            self._replace(name, value)

    def _replace(self, name: str, value: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self._attach(name, None, getattr(self, "stride", 1))

    def _apply(self: Self, fn: Callable[..., Tensor], recurse: bool = True) -> Self:
        """A change of dtype is one of :attr:`dequantized_dtype`: weight and scale only move."""
        kept = {id(self.weight), id(self.scale)}

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if id(tensor) in kept and new.dtype != tensor.dtype else new

        self.dequantized_dtype = fn(self.weight.new_empty(0, dtype=self.dequantized_dtype)).dtype
        return super()._apply(moved, recurse)

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        axes = super().axes_of("weight" if name == "scale" else name)
        if name != "scale":
            return axes
        axis = self.quantization_per_channel_axis
        return [1] if axis is None else [plan if dim == axis else 1 for dim, plan in enumerate(axes)]

    def _matrix(self) -> Tensor:
        return scale_dequantize(self.weight, self.scale, self.dequantized_dtype)


class QuantizedColumnParallel(BaseQuantizeParallelLinear, ColumnParallelLinear):
    """:class:`ColumnParallelLinear` with a quantized weight.

    Args:
        quantization_type, quantization_per_channel_axis, quantized_dtype: as in a ``q_config``. The axis is 0 if none
            is given.
        Others: as for ColumnParallelLinear; ``dtype`` is that of the product, and of the bias.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        quantization_type: QuantizationType = QuantizationType.PER_TENSOR_SYMMETRIC,
        quantization_per_channel_axis: int | None = None,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype = QuantizedDtype.INT8,
        device: DeviceLike = None,
        **more: Any,
    ):
        self._set(_config(quantization_type, quantized_dtype, quantization_per_channel_axis))
        super().__init__(input_size, output_size, bias, gather_output, dtype=dtype, device=device, **more)


class QuantizedRowParallel(BaseQuantizeParallelLinear, RowParallelLinear):
    """:class:`RowParallelLinear` with a quantized weight; arguments as for :class:`QuantizedColumnParallel`."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        quantization_type: QuantizationType = QuantizationType.PER_TENSOR_SYMMETRIC,
        quantization_per_channel_axis: int | None = None,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        quantized_dtype: QuantizedDtype = QuantizedDtype.INT8,
        device: DeviceLike = None,
        **more: Any,
    ):
        self._set(_config(quantization_type, quantized_dtype, quantization_per_channel_axis))
        super().__init__(input_size, output_size, bias, input_is_parallel, dtype=dtype, device=device, **more)


def _config(kind: QuantizationType, dtype: QuantizedDtype, axis: int | None) -> dict[str, Any]:
    return {"quantization_type": kind, "quantized_dtype": dtype, "quantization_per_channel_axis": axis}
