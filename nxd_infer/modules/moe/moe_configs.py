"""Configurations of :class:`~nxd_infer.modules.moe.expert_mlps_v2.ExpertMLPsV2`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from nxd_infer.errors import ParallelConfigError
from nxd_infer.modules.activations import known_activation
from nxd_infer.parallel_layers.base import Fill


class GLUType(enum.Enum):
    """How gate and up become one: ``act(gate) * up``, or ``gate * sigmoid(scale * gate) * (up + bias)`` (SWIGLU)."""

    GLU = "glu"
    SWIGLU = "swiglu"


@dataclass
class RoutedExpertsMLPOpsConfig:
    """What the experts compute.

    ``hidden_act``: silu, gelu, gelu_new, gelu_pytorch_tanh, relu, tanh; ``"swiglu"`` is silu with ``glu_mlp``.
    ``glu_mlp``: gate and up projections; else the activation of one projection.
    ``capacity_factor``: an expert takes at most this many times an equal share of the assignments, and drops those of
    later tokens; None drops none.
    ``normalize_top_k_affinities``: the affinities of a token's experts sum to 1, before any are dropped.
    ``early_expert_affinity_modulation``: affinities multiply the experts' inputs instead of their outputs.
    ``hidden_act_scaling_factor``, ``hidden_act_bias``: of GLUType.SWIGLU.
    ``gate_clamp_...``, ``up_clamp_...``: limits of what these projections give.
    ``bias``: all projections have one.
    ``input_layer_init_method``, ``output_layer_init_method``: fill an expert's ``[out, in]`` in place.
    ``enable_spmd_rank``, ``use_index_calc_kernel``: they change nothing here.

    Raises ValueError for values out of range.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    hidden_act: str = "silu"
    bias: bool = False
    glu_mlp: bool = True
    glu_type: GLUType | str = GLUType.GLU
    hidden_act_scaling_factor: float = 1.0
    hidden_act_bias: float = 0.0
    gate_clamp_upper_limit: float | None = None
    gate_clamp_lower_limit: float | None = None
    up_clamp_upper_limit: float | None = None
    up_clamp_lower_limit: float | None = None
    capacity_factor: float | None = None
    normalize_top_k_affinities: bool = False
    early_expert_affinity_modulation: bool = False
    input_layer_init_method: Fill | None = None
    output_layer_init_method: Fill | None = None
    enable_spmd_rank: bool = False
    use_index_calc_kernel: bool = False

    def __post_init__(self) -> None:
        if self.hidden_act == "swiglu" and self.glu_mlp:
            self.hidden_act = "silu"
        self.glu_type = GLUType(self.glu_type)
        if self.glu_type is GLUType.GLU:
            self.hidden_act = known_activation(self.hidden_act)
            if self.hidden_act_scaling_factor != 1 or self.hidden_act_bias:
                raise ParallelConfigError("hidden_act_scaling_factor and hidden_act_bias need glu_type=GLUType.SWIGLU")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ParallelConfigError(f"capacity_factor must be above 0, or None, got {self.capacity_factor!r}")


@dataclass
class BlockwiseMatmulConfig:
    """How a device's kernel arranges dropless experts in blocks. It changes no result, and here nothing at all."""

    block_size: int | None = 512
    logical_nc_config: int = 1
    use_block_parallel: bool = False
    use_torch_block_wise: bool = False
    use_shard_on_intermediate_dynamic_while: bool = False
    use_shard_on_block_dynamic_while: bool = False
    blockwise_nki_autograd_cls: Any = None
    block_sharding_strategy: Any = None
    parallelize_token_to_block_mapping: bool = True
    optimized_block_to_token_mapping: bool = True
    always_augment_inputs_for_blockwise_matmul: bool = False
    skip_dma_token: bool = False
    skip_dma_weight: bool = False
    num_static_blocks: int | None = None

    @classmethod
    def from_kwargs(cls, **fields: Any) -> BlockwiseMatmulConfig:
        """Return one with these fields. Raises TypeError for one that there is not."""
        return cls(**fields)

    default = from_kwargs
