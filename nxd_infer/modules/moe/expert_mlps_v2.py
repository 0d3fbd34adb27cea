"""The routed experts: tokens to their experts, the experts' MLPs, and the weighted sum of what they give."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.activations import ACTIVATIONS
from nxd_infer.modules.moe.dispatch import dispatched, within_capacity
from nxd_infer.modules.moe.moe_configs import BlockwiseMatmulConfig, GLUType, RoutedExpertsMLPOpsConfig
from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import DeviceLike, Fill
from nxd_infer.parallel_layers.mappings import axis_of


class Experts(nn.Module):
    """``gate_up_proj`` [E, H, 2 I] (or ``up_proj`` [E, H, I] without a gate) and ``down_proj`` [E, I, H].

    The input has entered the tensor parallel region, and the result is this rank's partial sum.
    """

    def __init__(self, config: RoutedExpertsMLPOpsConfig, dtype: torch.dtype, device: DeviceLike, group: object):
        super().__init__()
        self.config = config
        blocks, (E, H, inner) = 1 + config.glu_mlp, (config.num_experts, config.hidden_size, config.intermediate_size)
        where = {"dtype": dtype, "device": device, "tensor_model_parallel_group": group, "bias": config.bias}
        fill, last_fill = config.input_layer_init_method, config.output_layer_init_method
        first = ExpertFusedColumnParallelLinear(
            E, H, blocks * inner, stride=blocks, init_method=fill, input_is_shared=True, **where
        )
        if config.glu_mlp:
            self.gate_up_proj = first
        else:
            self.up_proj = first
        self.down_proj = ExpertFusedRowParallelLinear(E, inner, H, False, init_method=last_fill, **where)

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        """Send row i of [N, H] through expert ``experts[i]`` of this rank; -1 gives zeros."""
        config = self.config
        if not config.glu_mlp:
            return self.down_proj(ACTIVATIONS[config.hidden_act](self.up_proj(x, experts)), experts)
        gate, up = self.gate_up_proj(x, experts).chunk(2, dim=1)
        gate = _clamped(gate, config.gate_clamp_lower_limit, config.gate_clamp_upper_limit)
        up = _clamped(up, config.up_clamp_lower_limit, config.up_clamp_upper_limit)
        if config.glu_type is GLUType.GLU:
            inner = ACTIVATIONS[config.hidden_act](gate) * up
        else:
            inner = gate * torch.sigmoid(config.hidden_act_scaling_factor * gate) * (up + config.hidden_act_bias)
        return self.down_proj(inner, experts)


def _clamped(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return x if low is None and high is None else x.clamp(low, high)


class ExpertMLPsV2(nn.Module):
    """``mlp_op.gate_up_proj`` and ``mlp_op.down_proj`` of all experts; see RoutedExpertsMLPOpsConfig.

    Args:
        blockwise_matmul_config, sequence_parallel_enabled, is_prefill: no effect: MoE gathers the sequence, and one
            implementation serves all numbers of tokens.
        tensor_model_parallel_group: None, an axis name, or a group of ``parallel_state``.
        expert_model_parallel_group: must be that of ``parallel_state``; the default.
        return_bias: must be False.
    """

    def __init__(
        self,
        routed_experts_mlp_config: RoutedExpertsMLPOpsConfig,
        blockwise_matmul_config: BlockwiseMatmulConfig | None = None,
        sequence_parallel_enabled: bool = False,
        return_bias: bool = False,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        *,
        is_prefill: bool = True,
        tensor_model_parallel_group: object = None,
        expert_model_parallel_group: object = None,
    ):
        super().__init__()
        if return_bias:
            raise ParallelConfigError("return_bias=True is not supported: the experts add their biases themselves")
        self.context = current_context()
        self.axis = axis_of(tensor_model_parallel_group, self.context)
        if expert_model_parallel_group is not None:
            axis = self.context.axis(axis_of(expert_model_parallel_group, self.context))
            if axis.ranks != (ours := self.context.ep.ranks):
                raise ParallelConfigError(f"expert_model_parallel_group must be {ours}, got {axis.ranks}: leave it out")
        self.routed_experts_mlp_config = config = routed_experts_mlp_config
        self.blockwise_matmul_config = blockwise_matmul_config or BlockwiseMatmulConfig.default()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.capacity_factor = config.capacity_factor
        self.normalize_top_k_affinities = config.normalize_top_k_affinities
        self.mlp_op = Experts(config, dtype, device, self.axis)

    def expert_capacity(self, tokens: int) -> int:
        """Return how many of ``tokens`` an expert takes: ``capacity_factor`` times an equal share, or all."""
        if self.capacity_factor is None:
            return tokens
        return min(math.ceil(tokens * self.top_k * self.capacity_factor / self.num_experts), tokens)

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        seq_len: int | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return [T, H]: for each token of ``hidden_states`` [T, H], which are equal on the tensor parallel ranks, the
        sum of its experts' results times their affinities.

        ``expert_affinities`` [T, E] and ``expert_index`` [T, k], int64, are a router's. Tokens where ``padding_mask``
        [T] is False or 0 go to no expert and give zeros. ``seq_len``: no effect.
        """
        here = {"process_group": self.axis, "context": self.context, "reduce_dtype": torch.float32}
        hidden_states = mappings.copy_to_tensor_model_parallel_region(hidden_states, **here)
        expert_affinities = mappings.copy_to_tensor_model_parallel_region(expert_affinities, **here)
        y = self.partial(hidden_states, expert_affinities, expert_index, padding_mask)
        return mappings.reduce_from_tensor_model_parallel_region(y, **here)

    def partial(
        self, hidden_states: Tensor, expert_affinities: Tensor, expert_index: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute :meth:`forward` inside of the tensor parallel region: what the ranks return is to be summed."""
        affinities = expert_affinities.gather(1, expert_index)
        if self.normalize_top_k_affinities:
            affinities = affinities / affinities.sum(1, keepdim=True).clamp(min=1e-12)
        tokens, experts = len(hidden_states), expert_index
        if self.capacity_factor is not None:
            kept = within_capacity(expert_index, self.num_experts, self.expert_capacity(tokens))
            experts = experts.where(kept, -1)
        if padding_mask is not None:
            experts = experts.where(padding_mask.reshape(-1, 1) != 0, -1)
        early = self.routed_experts_mlp_config.early_expert_affinity_modulation
        affinities = affinities.to(hidden_states.dtype).reshape(-1, 1)
        rows = hidden_states.repeat_interleave(self.top_k, 0)
        rows = rows * affinities if early else rows
        rows, local, back = dispatched(rows, experts.reshape(-1), self.num_experts, self.context)
        y = back(self.mlp_op(rows, local))
        y = y if early else y * affinities.to(y.dtype)
        # A dropped row is zero, except for a bias of an expert that it did not go to.
        y = y * (experts.reshape(-1, 1) >= 0) if self.routed_experts_mlp_config.bias else y
        return y.unflatten(0, (tokens, self.top_k)).sum(1)


class ExpertMLPs(ExpertMLPsV2):
    """ExpertMLPsV2 of the fields of RoutedExpertsMLPOpsConfig, by keyword, and of BlockwiseMatmulConfig.

    ``init_method`` is the former's ``input_layer_init_method``.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool = True,
        capacity_factor: float | None = None,
        *,
        return_bias: bool = False,
        init_method: Fill | None = None,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        tensor_model_parallel_group: object = None,
        **fields: Any,
    ):
        given = {"glu_mlp": glu_mlp, "capacity_factor": capacity_factor, "input_layer_init_method": init_method}
        known = {field.name for field in dataclasses.fields(RoutedExpertsMLPOpsConfig)}
        given |= {name: fields.pop(name) for name in known & fields.keys()}
        config = RoutedExpertsMLPOpsConfig(num_experts, hidden_size, intermediate_size, top_k, hidden_act, **given)
        blockwise, group = BlockwiseMatmulConfig.from_kwargs(**fields), tensor_model_parallel_group
        super().__init__(config, blockwise, False, return_bias, dtype, device, tensor_model_parallel_group=group)
