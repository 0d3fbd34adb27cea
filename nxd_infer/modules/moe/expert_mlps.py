"""The routed experts, from keywords."""

from __future__ import annotations

from typing import Any

import torch

from nxd_infer.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from nxd_infer.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from nxd_infer.parallel_layers.base import DeviceLike, Fill


class ExpertMLPs(ExpertMLPsV2):
    """:class:`~nxd_infer.modules.moe.expert_mlps_v2.ExpertMLPsV2` of a RoutedExpertsMLPOpsConfig's fields.

    ``init_method`` and ``output_layer_init_method`` are its two init methods. Further keywords are the fields of
    BlockwiseMatmulConfig, which change nothing here.
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
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        return_bias: bool = False,
        init_method: Fill | None = None,
        output_layer_init_method: Fill | None = None,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        tensor_model_parallel_group: object = None,
        enable_spmd_rank: bool = False,
        early_expert_affinity_modulation: bool = False,
        bias: bool = False,
        **blockwise: Any,
    ):
        config = RoutedExpertsMLPOpsConfig(
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            top_k=top_k,
            hidden_act=hidden_act,
            bias=bias,
            glu_mlp=glu_mlp,
            capacity_factor=capacity_factor,
            normalize_top_k_affinities=normalize_top_k_affinities,
            early_expert_affinity_modulation=early_expert_affinity_modulation,
            input_layer_init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            enable_spmd_rank=enable_spmd_rank,
        )
        if block_size is not None:
            blockwise["block_size"] = block_size
        super().__init__(
            config,
            BlockwiseMatmulConfig.from_kwargs(**blockwise),
            return_bias=return_bias,
            dtype=dtype,
            device=device,
            tensor_model_parallel_group=tensor_model_parallel_group,
        )
