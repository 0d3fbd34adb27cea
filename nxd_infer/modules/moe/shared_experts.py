"""Experts that every token goes to: one MLP beside the routed ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.activations import ACTIVATIONS, known_activation
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import DeviceLike
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear


class SharedExperts(nn.Module):
    """``down(act(gate(x)) * up(x))`` of ``num_shared_experts * intermediate_size`` inner features.

    Args:
        hidden_act: as for the routed experts.
        reduce_dtype: results are summed over the tensor parallel ranks in it.
        fused_gate_up_projection: one ``gate_up_proj`` instead of ``gate_proj`` and ``up_proj``.
        sequence_parallel_enabled, sequence_dimension: x is this rank's piece of the sequence.
        transpose_weights: must be False.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        reduce_dtype: torch.dtype = torch.float32,
        fused_gate_up_projection: bool = False,
        sequence_parallel_enabled: bool = False,
        transpose_weights: bool = False,
        sequence_dimension: int | None = None,
        tensor_model_parallel_group: object = None,
    ):
        super().__init__()
        if transpose_weights:
            raise ParallelConfigError("transpose_weights=True is for a device's kernel: leave it out")
        self.act = ACTIVATIONS[known_activation(hidden_act)]
        self.fused, inner = fused_gate_up_projection, intermediate_size * num_shared_experts
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension or 0
        where = {"dtype": dtype, "device": device, "tensor_model_parallel_group": tensor_model_parallel_group}
        column = {"bias": False, "gather_output": False, "input_is_shared": True, **where}
        if self.fused:
            self.gate_up_proj = ColumnParallelLinear(hidden_size, 2 * inner, stride=2, **column)
        else:
            self.gate_proj = ColumnParallelLinear(hidden_size, inner, **column)
            self.up_proj = ColumnParallelLinear(hidden_size, inner, **column)
        self.down_proj = RowParallelLinear(inner, hidden_size, False, True, reduce_output=False, **where)
        here = self.down_proj
        self._here = {"process_group": here.axis, "context": here.context, "reduce_dtype": reduce_dtype}

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        dim, here = self.sequence_dimension, self._here
        if self.sequence_parallel_enabled:
            y = self.partial(mappings.gather_from_sequence_parallel_region(x, dim, **here))
            return mappings.reduce_scatter_to_sequence_parallel_region(y, dim, **here)
        y = self.partial(mappings.copy_to_tensor_model_parallel_region(x, **here))
        return mappings.reduce_from_tensor_model_parallel_region(y, **here)

    def partial(self, x: Tensor) -> Tensor:
        """Map [..., H] inside of the tensor parallel region: what the ranks return is to be summed."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.fused else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.act(gate) * up)
