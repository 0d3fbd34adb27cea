"""2-D convolutions whose channels are split over the tensor-parallel ranks.

``OutputChannelParallelConv2d`` is to ``InputChannelParallelConv2d`` what the column-parallel linear layer is to the
row-parallel one. Images are ``[N, C, H, W]`` or ``[C, H, W]``, weights ``[out, in, height, width]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import DeviceLike, WeightAndBias, size_plan


class _ParallelConv2d(WeightAndBias):
    _geometry: nn.Conv2d
    """How PyTorch pads and strides. No child, because it has weights of its own."""

    def _set_geometry(self, in_channels: int, out_channels: int, groups: int, padding: Any, **of_torch: Any) -> None:
        """Take the options of ``nn.Conv2d``. Raises ParallelConfigError for those that it or this package rejects."""
        if groups != 1:
            raise ParallelConfigError(
                f"{type(self).__name__} splits channels over ranks and takes groups=1, got {groups}"
            )
        try:
            geometry = nn.Conv2d(1, 1, padding=padding, bias=False, device="meta", **of_torch)
        except ValueError as error:
            raise ParallelConfigError(f"{type(self).__name__}: {error}") from error
        vars(self)["_geometry"] = geometry
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.conv_stride, self.dilation = geometry.kernel_size, geometry.stride, geometry.dilation
        self.padding, self.padding_mode = geometry.padding, geometry.padding_mode
        self.fan_in = in_channels * math.prod(geometry.kernel_size)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._geometry._conv_forward(x, weight, bias)


class OutputChannelParallelConv2d(_ParallelConv2d):
    """``nn.Conv2d`` with its output channels split over the ranks.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in
            ``nn.Conv2d``; ``groups`` must be 1. With ``gather_output`` every rank has the full bias, else it is split.
        gather_output: return all channels on every rank, else this rank's.
        dtype, device, init_method, keep_master_weight, tensor_model_parallel_group, reduce_dtype: as for
            ColumnParallelLinear.
        partition_pad: pad the channels to a multiple of the degree with channels of zeros.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        *,
        init_method: Callable[[Tensor], object] | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        tensor_model_parallel_group: object = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ):
        super().__init__(tensor_model_parallel_group)
        of_torch = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation, "padding_mode": padding_mode}
        self._set_geometry(in_channels, out_channels, groups, padding, **of_torch)
        self.init_method, self.keep_master_weight = init_method, keep_master_weight
        self.gather_output = gather_output
        self.reduce_dtype = reduce_dtype
        self.weight_partition_dim = 0
        self.output_plan = size_plan(out_channels, pad=partition_pad)
        self.make_parameters(bias, dtype, device)

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        if name == "weight":
            return (self.output_plan, self.in_channels, *self.kernel_size)
        return (self.out_channels,) if self.gather_output else (self.output_plan,)

    def plans_changed(self) -> None:
        plan = self.output_plan
        self.output_channel_size_per_partition = plan.local_size(self.degree)
        self.use_index("output_index", self.gather_index_of(plan) if self.gather_output else None)
        self.elements = self.elements_of(plan)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, in, H, W]`` to ``[N, out, H', W']``, or to this rank's channels."""
        self.require_divisible("out_channels", self.output_plan)
        x = mappings.copy_to_tensor_model_parallel_region(
            x, self.axis, context=self.context, reduce_dtype=self.reduce_dtype
        )
        weight, bias = self.logical(self.weight, self.elements), self.bias
        if bias is not None and not self.gather_output:
            bias = self.logical(bias, self.elements)
        if not self.gather_output or self.degree == 1:
            return self._convolve(x, weight, bias)
        y = self.gather_output_features(self._convolve(x, weight, None), self.output_plan, "output_index", dim=-3)
        return y if bias is None else y + bias.to(y.dtype)[:, None, None]


class InputChannelParallelConv2d(_ParallelConv2d):
    """``nn.Conv2d`` with its input channels split over the ranks; the ranks' results are summed.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in
            ``nn.Conv2d``; ``groups`` must be 1. Every rank has the full bias.
        input_is_parallel: ``x`` already holds only this rank's channels.
        dtype, device, init_method, keep_master_weight, tensor_model_parallel_group, reduce_dtype: as for
            RowParallelLinear.
        partition_pad: pad the channels to a multiple of the degree with channels of zeros.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        *,
        init_method: Callable[[Tensor], object] | None = None,
        keep_master_weight: bool = False,
        partition_pad: bool = False,
        tensor_model_parallel_group: object = None,
        reduce_dtype: torch.dtype | None = torch.float32,
    ):
        super().__init__(tensor_model_parallel_group)
        of_torch = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation, "padding_mode": padding_mode}
        self._set_geometry(in_channels, out_channels, groups, padding, **of_torch)
        self.init_method, self.keep_master_weight = init_method, keep_master_weight
        self.input_is_parallel = input_is_parallel
        self.reduce_dtype = reduce_dtype
        self.weight_partition_dim = 1
        self.input_plan = size_plan(in_channels, pad=partition_pad)
        self.make_parameters(bias, dtype, device)

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        if name == "weight":
            return (self.out_channels, self.input_plan, *self.kernel_size)
        return (self.out_channels,)

    def plans_changed(self) -> None:
        plan = self.input_plan
        self.input_channel_size_per_partition = plan.local_size(self.degree)
        self.use_index("input_index", None if self.input_is_parallel else self.scatter_index_of(plan))
        self.elements = self.elements_of(plan)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, in, H, W]``, or this rank's channels of it, to ``[N, out, H', W']``."""
        self.require_divisible("in_channels", self.input_plan)
        if not self.input_is_parallel:
            x = self.scatter_input_features(x, self.input_plan, "input_index", dim=-3)
        weight = self.logical(self.weight, self.elements, dim=1)
        if self.degree == 1:
            return self._convolve(x, weight, self.bias)
        y = mappings.reduce_from_tensor_model_parallel_region(
            self._convolve(x, weight, None), self.axis, context=self.context, reduce_dtype=self.reduce_dtype
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)[:, None, None]
