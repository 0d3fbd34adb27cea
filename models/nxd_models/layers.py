"""Layers shared by the families: a block's linear layers, RMS norm, activations, initialization.

Rotary positions are in :mod:`nxd_models.rope`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Protocol

import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.layout import AxisPlan
from nxd_infer.modules.activations import ACTIVATIONS, known_activation
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.layer_norm import SequenceParallelWeights
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from nxd_models.hf.config_file import Problem

Activation = Annotated[
    str,
    AfterValidator(known_activation),
    Problem(f"this activation is not supported; known are {', '.join(ACTIVATIONS)}"),
]
"""The type of a configuration field that names one of ACTIVATIONS."""


SEQUENCE = 1
"""The dimension of the sequence in hidden states [B, S, E]."""


class Sized(Protocol):
    """What linear layers take from a family's configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def initializer_range(self) -> float: ...


def first_linear(
    config: Sized, outputs: int, bias: bool, axis: AxisPlan, dtype: torch.dtype, *, shared: bool = False
) -> ColumnParallelLinear:
    """Return a layer from hidden states to this rank's part of a block, cut as ``axis`` says.

    ``shared``: its caller enters the parallel region, once for all layers that read the same input.
    """
    return ColumnParallelLinear(
        config.hidden_size,
        outputs,
        bias=bias,
        gather_output=False,
        dtype=dtype,
        init_method=normal_init(config.initializer_range),
        output_plan=axis,
        input_is_shared=shared,
    )


def last_linear(
    config: Sized, inputs: int, bias: bool, axis: AxisPlan, dtype: torch.dtype, sequence_parallel: bool = False
) -> RowParallelLinear:
    """Return the layer that sums a block's results over the ranks, into hidden states."""
    return RowParallelLinear(
        inputs,
        config.hidden_size,
        bias=bias,
        input_is_parallel=True,
        sequence_parallel_enabled=sequence_parallel,
        dtype=dtype,
        init_method=normal_init(config.initializer_range),
        sequence_dimension=SEQUENCE,
        input_plan=axis,
    )


class ParallelBlock(nn.Module):
    """A block whose first layers share one input and whose last layer sums over the ranks."""

    def __init__(self, sequence_parallel: bool):
        super().__init__()
        self.context = current_context()
        self.sequence_parallel_enabled = sequence_parallel

    def enter(self, x_BSE: Tensor) -> Tensor:
        """Enter the parallel region once for all layers that read ``x``: one collective in each direction."""
        if self.sequence_parallel_enabled:
            return mappings.gather_from_sequence_parallel_region(
                x_BSE, SEQUENCE, context=self.context, reduce_dtype=torch.float32
            )
        return mappings.copy_to_tensor_model_parallel_region(x_BSE, context=self.context, reduce_dtype=torch.float32)


class RMSNorm(SequenceParallelWeights):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, with the mean in at least float32.

    ``sequence_parallel``: the input is this rank's piece of the sequence.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, sequence_parallel: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))
        self.eps = eps
        self.sequence_parallel_enabled = sequence_parallel
        self._mark()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """``weight`` replaces the module's own weight, for a caller that routes its gradient."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight if weight is None else weight) * wide.to(x.dtype)


def normal_init(std: float) -> Callable[[Tensor], object]:
    return partial(nn.init.normal_, std=std)


def zero_biases(module: nn.Module) -> None:
    """Set biases to zero, as in these families; the default of the layers is that of ``nn.Linear``."""
    for name, param in module.named_parameters():
        if name.endswith("bias") and not param.is_meta:
            nn.init.zeros_(param)
