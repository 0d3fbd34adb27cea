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
from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_infer.quantization.dequantize import absolute_maximum, quantized, scale_dequantize, scale_for
from nxd_infer.quantization.quantization_config import FIELDS, QuantizedDtype, scheme

Self = TypeVar("Self", bound="BaseQuantizeParallelLinear")


class BaseQuantizeParallelLinear(ParallelLayer):
    """What the layers share; it comes before the float layer among the bases, whose weight it quantizes."""

    weight: nn.Parameter
    scale: nn.Parameter
    quantized_dtype: QuantizedDtype
    dequantized_dtype: torch.dtype
    channels: tuple[int, ...]
    """Dimensions of the weight with a scale for each index."""
    dims = 2
    """Of the weight, and of the sizes."""

    def __init__(self, *sizes: int, **more: Any):
        config = {name: more.pop(name) for name in FIELDS if name in more}
        if len(sizes) > self.dims:
            raise ParallelConfigError(f"{type(self).__name__} takes {self.dims} sizes, and all else by keyword")
        self.quantized_dtype, self.channels = scheme(config, self.dims)
        super().__init__(*sizes, **more)

    @classmethod
    def from_float(cls: type[Self], mod: nn.Module, q_config: Mapping[str, Any] | None = None) -> Self:
        """Return the quantized layer of a float one, which stays as it is. At degrees above 1 every rank calls it.

        A weight on the meta device stays there, for a checkpoint to fill. Raises ParallelConfigError for a layer of
        another class, or an unknown ``q_config``.
        """
        base = cls.__bases__[1]
        if not isinstance(mod, base):
            raise ParallelConfigError(f"{cls.__name__} is made of a {base.__name__}, got {type(mod).__name__}")
        layer = cls.__new__(cls)
        own = vars(mod).items()
        vars(layer).update({name: dict(value) if isinstance(value, dict) else value for name, value in own})
        layer.quantized_dtype, layer.channels = scheme(q_config, cls.dims)
        layer._quantize()
        return layer

    def reset_parameters(self) -> None:
        if self.weight.dtype is self.quantized_dtype.value:
            self._replace("weight", torch.empty_like(self.weight, dtype=self.dequantized_dtype))
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]
        self._quantize()

    @torch.no_grad()
    def _quantize(self) -> None:
        weight, layout = self.weight, layout_of(self, "weight")
        self.dequantized_dtype = weight.dtype
        maximum = absolute_maximum(weight, self.channels)  # and over the ranks: the scale is that of the logical weight
        if layout is not None and layout.partition_dim not in self.channels:
            maximum = comm.all_reduce(maximum, self.context, self.axis, "max")
        if weight.dim() == 3 and 0 not in self.channels:
            maximum = comm.all_reduce(maximum, self.context, "ep", "max")
        scale = scale_for(maximum, self.quantized_dtype.value)
        self._replace("weight", quantized(weight, scale, self.quantized_dtype.value))
        self._replace("scale", scale)

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
        return [plan if dim in self.channels else 1 for dim, plan in enumerate(axes)] if self.channels else [1]

    def _matrix(self) -> Tensor:
        return scale_dequantize(self.weight, self.scale, self.dequantized_dtype)


class QuantizedColumnParallel(BaseQuantizeParallelLinear, ColumnParallelLinear):
    """:class:`ColumnParallelLinear` with a quantized weight.

    Args:
        sizes: those of the float layer, by place; all others by keyword.
        more: ``quantization_type``, ``quantized_dtype`` and ``quantization_per_channel_axis`` as in a ``q_config``, and
            what the float layer takes; ``dtype`` is that of the product, and of the bias.
    """


class QuantizedRowParallel(BaseQuantizeParallelLinear, RowParallelLinear):
    """:class:`RowParallelLinear` with a quantized weight; arguments as for QuantizedColumnParallel, as for the next."""


class QuantizedExpertFusedColumnParallel(BaseQuantizeParallelLinear, ExpertFusedColumnParallelLinear):
    """:class:`ExpertFusedColumnParallelLinear` with a quantized weight ``[experts, inputs, outputs]``."""

    dims = 3


class QuantizedExpertFusedRowParallel(BaseQuantizeParallelLinear, ExpertFusedRowParallelLinear):
    """:class:`ExpertFusedRowParallelLinear` with a quantized weight."""

    dims = 3
