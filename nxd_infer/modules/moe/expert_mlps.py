"""The routed experts, from keywords."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from nxd_infer.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from nxd_infer.modules.moe.moe_configs import BlockwiseMatmulConfig, RoutedExpertsMLPOpsConfig
from nxd_infer.parallel_layers.base import DeviceLike, Fill


class ExpertMLPs(ExpertMLPsV2):
    """:class:`~nxd_infer.modules.moe.expert_mlps_v2.ExpertMLPsV2` of a RoutedExpertsMLPOpsConfig's fields.

    ``init_method`` and ``output_layer_init_method`` are its two init methods. ``more``: its further fields, and those
    of BlockwiseMatmulConfig, which change nothing here.
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
        **more: Any,
    ):
        given = {"glu_mlp": glu_mlp, "capacity_factor": capacity_factor, "input_layer_init_method": init_method}
        given["normalize_top_k_affinities"] = normalize_top_k_affinities
        given["output_layer_init_method"] = output_layer_init_method
        fields = {field.name for field in dataclasses.fields(RoutedExpertsMLPOpsConfig)}
        given |= {name: more.pop(name) for name in fields & more.keys()}
        config = RoutedExpertsMLPOpsConfig(num_experts, hidden_size, intermediate_size, top_k, hidden_act, **given)
        if block_size is not None:
            more["block_size"] = block_size
        blockwise, group = BlockwiseMatmulConfig.from_kwargs(**more), tensor_model_parallel_group
        super().__init__(config, blockwise, False, return_bias, dtype, device, tensor_model_parallel_group=group)
