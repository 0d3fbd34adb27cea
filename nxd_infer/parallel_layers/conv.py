"""2-D convolutions whose channels are split over the tensor-parallel ranks.

``OutputChannelParallelConv2d`` is to ``InputChannelParallelConv2d`` what the column-parallel linear layer is to the
row-parallel one. Images are ``[N, C, H, W]`` or ``[C, H, W]``, weights ``[out, in, height, width]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import _pair

from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import (
    DeviceLike,
    ParallelLayer,
    device_of,
    init_linear_bias,
    init_linear_weight,
    size_plan,
)

_PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class _ParallelConv2d(ParallelLayer):
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int],
        padding: int | tuple[int, int] | str,
        dilation: int | tuple[int, int],
        groups: int,
        padding_mode: str,
        init_method: Callable[[Tensor], object] | None,
        keep_master_weight: bool,
        group: object,
    ):
        super().__init__(group)
        if groups != 1:
            raise ParallelConfigError(
                f"{type(self).__name__} splits channels over ranks and takes groups=1, got {groups}"
            )
        if padding_mode not in _PADDING_MODES:
            raise ParallelConfigError(f"padding_mode must be one of {', '.join(_PADDING_MODES)}; got {padding_mode!r}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.conv_stride, self.dilation = _pair(kernel_size), _pair(stride), _pair(dilation)
        self.padding = padding if isinstance(padding, str) else _pair(padding)
        self.padding_mode = padding_mode
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight

    def reset_parameters(self) -> None:
        """Give the layer the logical weights that ``nn.Conv2d`` would have after the same seed."""
        fill = self.init_method or init_linear_weight
        self.master_weight = self.init_parameter("weight", fill, keep_master=self.keep_master_weight)
        if self.bias is not None:
            fill = init_linear_bias(self.in_channels * self.kernel_size[0] * self.kernel_size[1])
            self.master_bias = self.init_parameter("bias", fill, keep_master=self.keep_master_weight)

    def _make_parameters(self, bias: bool, dtype: torch.dtype, device: torch.device | None) -> None:
        self.plans_changed()
        self.new_parameter("weight", dtype, device)
        if bias:
            self.new_parameter("bias", dtype, device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = self.padding
        if self.padding_mode != "zeros" and padding != "valid":
            x = F.pad(x, self._border(), _PADDING_MODES[self.padding_mode])
            padding = 0
        return F.conv2d(x, weight, bias, self.conv_stride, padding, self.dilation)

    def _border(self) -> list[int]:
        """Widths for F.pad: left, right, top, bottom."""
        sides: list[int] = []
        for i in (1, 0):
            if self.padding == "same":
                total = self.dilation[i] * (self.kernel_size[i] - 1)
                sides += [total // 2, total - total // 2]
            else:
                sides += [int(self.padding[i])] * 2
        return sides


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
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            padding_mode,
            init_method,
            keep_master_weight,
            tensor_model_parallel_group,
        )
        self.gather_output = gather_output
        self.reduce_dtype = reduce_dtype
        self.weight_partition_dim = 0
        self.output_plan = size_plan(out_channels, pad=partition_pad)
        self._make_parameters(bias, dtype, device_of(device))

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
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            padding_mode,
            init_method,
            keep_master_weight,
            tensor_model_parallel_group,
        )
        self.input_is_parallel = input_is_parallel
        self.reduce_dtype = reduce_dtype
        self.weight_partition_dim = 1
        self.input_plan = size_plan(in_channels, pad=partition_pad)
        self._make_parameters(bias, dtype, device_of(device))

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
