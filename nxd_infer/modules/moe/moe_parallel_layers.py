"""Linear layers of all experts in one parameter ``[E, in, out]``, and the router's linear layer.

The experts are split over the expert parallel ranks, and each of them over the tensor parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxd_infer.context import ParallelContext
from nxd_infer.errors import ShardingError
from nxd_infer.layout import AxisPlan
from nxd_infer.ops import expert_linear
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import (
    DeviceLike,
    Fill,
    WeightAndBias,
    device_of,
    init_linear_weight,
    size_plan,
    whole_size,
)
from nxd_infer.parallel_layers.layer_norm import SequenceParallelWeights


def expert_axis(num_experts: int, context: ParallelContext) -> AxisPlan | int:
    """Return a parameter's axis of experts, of which this expert parallel rank has an equal part.

    Raises ShardingError if they do not divide over the ranks.
    """
    ep = context.ep
    if num_experts % ep.degree:
        raise ShardingError(
            f"{num_experts} experts do not divide over {ep.degree} expert parallel ranks: use a degree that does"
        )
    each = num_experts // ep.degree
    return num_experts if ep.degree == 1 else AxisPlan.held(num_experts, ep.rank * each, (ep.rank + 1) * each)


class ExpertFusedLinear(WeightAndBias):
    """``y[e] = x[e] A[e] + b[e]``: a weight ``[E / ep, in, out]`` and a bias ``[E / ep, out]``, or None.

    Each expert is initialised as an ``nn.Linear`` of its own, one after another. Raises ShardingError if the experts do
    not divide over the expert parallel ranks.

    Args:
        num_experts, input_size, output_size: logical sizes.
        stride: the split size consists of ``stride`` blocks (such as gate and up), and each rank holds a piece of each.
        init_method: fills an expert's logical ``[output_size, input_size]`` in place; default as in ``nn.Linear``.
        dtype, device, keep_master_weight, tensor_model_parallel_group: as for ColumnParallelLinear.
    """

    shown = ("num_experts", "input_size", "output_size")
    split: int
    """0 if the inputs are split over the tensor parallel ranks, 1 if the outputs are."""

    def __init__(
        self,
        num_experts: int,
        input_size: int,
        output_size: int,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        stride: int = 1,
        init_method: Fill | None = None,
        keep_master_weight: bool = False,
        tensor_model_parallel_group: object = None,
        *,
        bias: bool = False,
    ):
        super().__init__(tensor_model_parallel_group)
        self.num_experts, self.stride = whole_size(num_experts), stride
        sizes = self.input_size, self.output_size = whole_size(input_size), whole_size(output_size)
        self._axes = [size_plan(size, stride) if at == self.split else size for at, size in enumerate(sizes)]
        self._experts = expert_axis(self.num_experts, self.context)
        self.num_local_experts = self.num_experts // self.context.ep.degree
        self.init_method = partial(_fill_each, init_method or init_linear_weight)
        self.keep_master_weight, self.fan_in = keep_master_weight, self.input_size
        self.make_parameters(bias, dtype, device, stride)

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        return (self._experts, *(self._axes if name == "weight" else self._axes[1:]))

    def _matrix(self) -> Tensor:
        return self.weight

    def _linear(self, x: Tensor, experts: Tensor | None, bias: Tensor | None) -> Tensor:
        for name, axis in zip(("input_size", "output_size"), self._axes, strict=True):
            if isinstance(axis, AxisPlan):
                self.require_divisible(name, axis)
        weight = mappings.with_mean_gradient(self._matrix(), context=self.context)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if experts is None:
            y = torch.einsum("e...i,eio->e...o", x, weight)
            return y if bias is None else y + bias.reshape(bias.shape[0], *[1] * (y.dim() - 2), -1)
        y = expert_linear(x, weight.transpose(1, 2), experts)
        return y if bias is None else y + bias[experts.clamp(min=0)]

    def _shift(self) -> Tensor | None:
        return None if self.bias is None else mappings.with_mean_gradient(self.bias, context=self.context)


def _fill_each(fill: Fill, weight: Tensor) -> None:
    for matrix in weight:
        fill(matrix.t())


class ExpertFusedColumnParallelLinear(ExpertFusedLinear):
    """Splits the outputs. ``input_is_shared``: the caller has entered the parallel region, as for ColumnParallelLinear.

    The other arguments are those of ExpertFusedLinear.
    """

    split = 1

    def __init__(self, *sizes: Any, input_is_shared: bool = False, **options: Any):
        super().__init__(*sizes, **options)
        self.input_is_shared = input_is_shared

    def forward(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """[E / ep, ..., in] -> [E / ep, ..., out / tp]; with ``experts`` [N] (of this rank, -1: zeros) rows [N, in]."""
        if not self.input_is_shared:
            x = mappings.copy_to_tensor_model_parallel_region(
                x, self.axis, context=self.context, reduce_dtype=torch.float32
            )
        return self._linear(x, experts, self._shift())


class ExpertFusedRowParallelLinear(ExpertFusedLinear):
    """Splits the inputs; the ranks' results are summed, or with ``reduce_output=False`` this rank's is returned.

    The other arguments are those of ExpertFusedLinear.
    """

    split = 0

    def __init__(
        self, num_experts: int, input_size: int, output_size: int, reduce_output: bool = True, *more: Any, **named: Any
    ):
        super().__init__(num_experts, input_size, output_size, *more, **named)
        self.reduce_output = reduce_output

    def forward(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """[E / ep, ..., in / tp] -> [E / ep, ..., out]; with ``experts`` [N] (of this rank, -1: zeros) rows."""
        here = {"process_group": self.axis, "context": self.context, "reduce_dtype": torch.float32}
        bias = self._shift()
        if bias is not None:  # each rank adds an equal share, so that the sum over the ranks has it once
            bias = mappings.copy_to_tensor_model_parallel_region(bias, **here) / self.degree
        y = self._linear(x, experts, bias)
        return mappings.reduce_from_tensor_model_parallel_region(y, **here) if self.reduce_output else y


class LinearRouter(SequenceParallelWeights, nn.Linear):
    """``nn.Linear`` from hidden states to experts, replicated. It computes in ``dtype``, or in its weight's if wider.

    Autocast, or a model converted to bfloat16, does not change that.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        sequence_parallel_enabled: bool = False,
    ):
        super().__init__(input_size, output_size, bias=bias, dtype=dtype, device=device_of(device))
        self.router_dtype = dtype
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self._mark()

    def forward(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(self.router_dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        if torch.is_autocast_enabled(input.device.type):
            with torch.autocast(input.device.type, enabled=False):
                return F.linear(input.to(dtype), self.weight.to(dtype), bias)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias)
