"""Layers whose weights are split over ranks, and their helpers."""

from nxd_infer.parallel_layers import layer_norm, pad, parallel_state, random, sequence_parallel, utils  # noqa: F401
from nxd_infer.parallel_layers.checkpointing import load, save
from nxd_infer.parallel_layers.grads import clip_grad_norm
from nxd_infer.parallel_layers.layers import (
    ColumnParallelLinear,
    InputChannelParallelConv2d,
    OutputChannelParallelConv2d,
    ParallelEmbedding,
    RowParallelLinear,
    SPMDRank,
)
from nxd_infer.parallel_layers.loss_functions import parallel_cross_entropy
from nxd_infer.parallel_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from nxd_infer.parallel_state import initialize_model_parallel

__all__ = [
    "ColumnParallelLinear", "InputChannelParallelConv2d", "OutputChannelParallelConv2d", "ParallelEmbedding",
    "RowParallelLinear", "SPMDRank", "clip_grad_norm", "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region", "gather_from_tensor_model_parallel_region", "initialize_model_parallel",
    "load", "parallel_cross_entropy", "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region", "save", "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]  # fmt: skip
