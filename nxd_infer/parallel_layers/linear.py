"""Linear layers whose weight is split over the tensor-parallel ranks, by rows (column parallel) or by columns.

Weights are ``[out, in]`` as in ``nn.Linear``. A pair of these layers needs one collective in each direction::

    x (replicated) -> ColumnParallelLinear(gather_output=False) -> RowParallelLinear(input_is_parallel=True) -> y

Source: API guide, "ColumnParallel Linear Layer" and "RowParallel Linear Layer".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nxd_infer.errors import ParallelConfigError, ShardingError
from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import DeviceLike, WeightAndBias, size_plan
from nxd_infer.util.also_called import also_called


def _dtype_is_fifth(given: Sequence[object]) -> bool:
    return len(given) > 5 and isinstance(given[5], torch.dtype)


class BaseParallelLinear(WeightAndBias):
    """What both linear layers are."""

    def initialize_weight_and_bias(self) -> None:
        """Fill the parameters again, as :meth:`reset_parameters` does."""
        self.reset_parameters()


class ColumnParallelLinear(BaseParallelLinear):
    """``y = x A^T + b`` with the rows of ``A`` (the outputs) split over the ranks.

    Args:
        input_size, output_size: logical sizes, as in ``nn.Linear``.
        bias: add a bias. With ``gather_output`` every rank holds the full bias, else it is split like the outputs.
        gather_output: return all ``output_size`` outputs on every rank, else this rank's.
        sequence_parallel_enabled: ``x`` is this rank's piece of the sequence and is gathered first; the backward is a
            reduce-scatter.
        dtype, device: of the parameters. Device None is PyTorch's default device.
        stride: the outputs consist of ``stride`` blocks (such as gate and up), and each rank holds a piece of each.
        init_method: fills the *logical* ``[output_size, input_size]`` weight in place; default as in ``nn.Linear``.
        sequence_dimension: dimension of the sequence; None is 0, as in the reference.
        keep_master_weight: keep the full initial weight in float32 (or wider) as ``master_weight``, and the bias as
            ``master_bias``.
        skip_bias_add: return ``(y, bias)`` and leave the addition to the caller.
        pad: pad the outputs to the next multiple of the degree (times ``pad_alignment_size_per_rank``) with zero rows.
        keep_padded_output: with ``pad`` and ``gather_output``, return the padded columns too, filled with the lowest
            finite value so that they never win an argmax.
        tensor_model_parallel_group: None, an axis name, or a group of ``parallel_state``.
        reduce_dtype: gradients of the input are summed over ranks in this dtype (float64 stays float64).
        output_plan: how the outputs are placed on the ranks, for heads and vocabularies; default: equal pieces.
        input_is_shared: several layers read this input, and the caller has entered the parallel region once for all of
            them (``copy_to_tensor_model_parallel_region`` or ``gather_from_sequence_parallel_region``), so that one
            collective sums their gradients. The layer itself then does not communicate its input.

    By place the arguments are also taken in the reference's order, ``dtype`` after ``gather_output``.

    ``x`` is ``[..., input_size]`` with any number of leading dimensions. If ``output_size`` does not divide over the
    ranks, the first call raises ShardingError, so ``pad_model`` can be applied before.
    """

    shown = ("input_size", "output_size", "gather_output")

    @also_called(
        "self input_size output_size bias gather_output dtype device stride init_method sequence_parallel_enabled "
        "sequence_dimension keep_master_weight skip_bias_add pad pad_alignment_size_per_rank keep_padded_output "
        "tensor_model_parallel_group reduce_dtype rank_ordering",
        when=_dtype_is_fifth,
        ignored="tile_cc",
        neutral={"rank_ordering": None},
    )
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        *,
        stride: int = 1,
        init_method: Callable[[Tensor], object] | None = None,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        pad_alignment_size_per_rank: int = 1,
        keep_padded_output: bool = False,
        tensor_model_parallel_group: object = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        output_plan: AxisPlan | None = None,
        input_is_shared: bool = False,
    ):
        super().__init__(tensor_model_parallel_group)
        if input_is_shared and sequence_parallel_enabled:
            raise ParallelConfigError(
                "ColumnParallelLinear with input_is_shared=True is given a whole sequence: gather it once before the "
                "layers that share it, and pass sequence_parallel_enabled=False"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_is_shared = input_is_shared
        self.gather_output = gather_output
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.stride = stride
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.skip_bias_add = skip_bias_add
        self.pad = pad
        self.keep_padded_output = keep_padded_output
        self.reduce_dtype = reduce_dtype
        self.weight_partition_dim, self.fan_in = 0, input_size
        self.output_plan = output_plan or size_plan(output_size, stride, pad, pad_alignment_size_per_rank)
        self.make_parameters(bias, dtype, device, stride)

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        if name == "weight":
            return (self.output_plan, self.input_size)
        return (self.output_size,) if self.gather_output else (self.output_plan,)

    def plans_changed(self) -> None:
        plan = self.output_plan
        self.output_size_per_partition = plan.local_size(self.degree)
        self.pad_size = plan.padded_size(self.degree) - plan.size
        self.use_index("output_index", self.gather_index_of(plan) if self.gather_output else None)
        self.elements = self.elements_of(plan)

    def _matrix(self) -> Tensor:
        """Return this rank's weight as ``[out, in]``, with the gradient of the logical weight."""
        return self.logical(self.weight, self.elements)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Map ``[..., input_size]`` to ``[..., output_size]`` (gathered) or this rank's outputs; see the class."""
        plan, here = self.output_plan, {"process_group": self.axis, "context": self.context}
        self.require_divisible("output_size", plan)
        if self.sequence_parallel_enabled:
            x = mappings.gather_from_sequence_parallel_region(
                x, self.sequence_dimension, reduce_dtype=self.reduce_dtype, **here
            )
        elif not self.input_is_shared:
            x = mappings.copy_to_tensor_model_parallel_region(x, reduce_dtype=self.reduce_dtype, **here)
        gathers = self.gather_output and (self.degree > 1 or self.pad_size > 0)
        weight, bias = self._matrix(), self.bias
        if bias is not None and not self.gather_output:
            bias = self.logical(bias, self.elements)
        y = F.linear(x, weight, None if gathers or self.skip_bias_add else bias)
        if gathers:
            y = self.gather_output_features(y, plan, "output_index")
            if bias is not None and not self.skip_bias_add:
                y = y + bias.to(y.dtype)
            if self.keep_padded_output and self.pad_size > 0:
                y = F.pad(y, (0, self.pad_size), value=torch.finfo(y.dtype).min)
        return (y, bias) if self.skip_bias_add else y


class RowParallelLinear(BaseParallelLinear):
    """``y = x A^T + b`` with the columns of ``A`` (the inputs) split over the ranks; the ranks' results are summed.

    Args:
        input_size, output_size, bias, dtype, device, stride, init_method, sequence_dimension, keep_master_weight,
            skip_bias_add, pad, tensor_model_parallel_group: as for ColumnParallelLinear. Every rank has the full bias.
        input_is_parallel: ``x`` is already this rank's piece, the output of a column-parallel layer.
        sequence_parallel_enabled: return this rank's piece of the sequence (a reduce-scatter instead of an
            all-reduce). Needs ``input_is_parallel=True``.
        reduce_output: False returns this rank's partial sum, of the whole sequence; there must be no bias to add then.
        reduce_dtype: the results are summed over ranks in this dtype and cast back (float64 stays float64).
        input_plan: how the inputs are placed on the ranks; the ``output_plan`` of the layer before.
    """

    shown = ("input_size", "output_size", "input_is_parallel")

    @also_called(
        "self input_size output_size bias input_is_parallel dtype device stride init_method sequence_parallel_enabled "
        "sequence_dimension keep_master_weight skip_bias_add pad reduce_output tensor_model_parallel_group "
        "reduce_dtype tile_cc rank_ordering",
        when=_dtype_is_fifth,
        ignored="tile_cc",
        neutral={"rank_ordering": None},
    )
    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        sequence_parallel_enabled: bool = False,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        *,
        stride: int = 1,
        init_method: Callable[[Tensor], object] | None = None,
        sequence_dimension: int | None = None,
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        reduce_output: bool = True,
        tensor_model_parallel_group: object = None,
        reduce_dtype: torch.dtype | None = torch.float32,
        input_plan: AxisPlan | None = None,
    ):
        super().__init__(tensor_model_parallel_group)
        if sequence_parallel_enabled and not input_is_parallel:
            raise ParallelConfigError(
                "RowParallelLinear with sequence_parallel_enabled=True takes an input that is split over the ranks: "
                "pass input_is_parallel=True, and gather_output=False to the layer before it"
            )
        if not reduce_output and bias and not skip_bias_add:
            raise ParallelConfigError(
                "RowParallelLinear with reduce_output=False returns partial sums, to which no bias can be added: "
                "pass bias=False or skip_bias_add=True"
            )
        self.input_size, self.output_size = input_size, output_size
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = sequence_dimension or 0
        self.stride = stride
        self.init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.skip_bias_add = skip_bias_add
        self.pad = pad
        self.reduce_output = reduce_output
        self.reduce_dtype = reduce_dtype
        self.weight_partition_dim = 1
        self.input_plan = input_plan or size_plan(input_size, stride, pad)
        self.fan_in = self.input_plan.size
        self.make_parameters(bias, dtype, device, stride)

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        return (self.output_size, self.input_plan) if name == "weight" else (self.output_size,)

    def plans_changed(self) -> None:
        plan = self.input_plan
        if plan.duplicated(self.degree):
            raise ShardingError(
                "RowParallelLinear sums the ranks' results, so no input may be on two ranks: "
                f"the plan of its {plan.size} inputs repeats some at degree {self.degree}"
            )
        self.input_size_per_partition = plan.local_size(self.degree)
        self.pad_size = plan.padded_size(self.degree) - plan.size
        self.use_index("input_index", None if self.input_is_parallel else self.scatter_index_of(plan))
        self.elements = self.elements_of(plan)

    def _matrix(self) -> Tensor:
        """Return this rank's weight as ``[out, in]``, with the gradient of the logical weight."""
        return self.logical(self.weight, self.elements, dim=1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Map ``[..., input_size]``, or this rank's part of it, to ``[..., output_size]``; see the class."""
        here = {"process_group": self.axis, "context": self.context}
        self.require_divisible("input_size", self.input_plan)
        if not self.input_is_parallel:
            x = self.scatter_input_features(x, self.input_plan, "input_index")
        weight = self._matrix()
        if self.degree == 1:
            y = F.linear(x, weight, None if self.skip_bias_add else self.bias)
            return (y, self.bias) if self.skip_bias_add else y
        y, bias = F.linear(x, weight), self.bias
        if self.sequence_parallel_enabled:
            if self.reduce_output:
                y = mappings.reduce_scatter_to_sequence_parallel_region(
                    y, self.sequence_dimension, reduce_dtype=self.reduce_dtype, **here
                )
            if bias is not None:  # each rank adds it to its own positions only, so its gradients must be summed
                bias = mappings.copy_to_tensor_model_parallel_region(bias, reduce_dtype=self.reduce_dtype, **here)
        elif self.reduce_output:
            y = mappings.reduce_from_tensor_model_parallel_region(y, reduce_dtype=self.reduce_dtype, **here)
        if self.skip_bias_add:
            return y, bias
        return y if bias is None else y + bias.to(y.dtype)
