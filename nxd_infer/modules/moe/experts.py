"""The MLPs of this rank's experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nxd_infer.modules.activations import ACTIVATIONS
from nxd_infer.modules.moe.moe_configs import GLUType, RoutedExpertsMLPOpsConfig
from nxd_infer.modules.moe.moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear
from nxd_infer.parallel_layers.base import DeviceLike


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
