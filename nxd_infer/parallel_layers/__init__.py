"""Layers whose weights are split over ranks, and their helpers. Names are resolved on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

_NAMES = {
    "ColumnParallelLinear": ".layers",
    "InputChannelParallelConv2d": ".layers",
    "OutputChannelParallelConv2d": ".layers",
    "ParallelEmbedding": ".layers",
    "RowParallelLinear": ".layers",
    "SPMDRank": ".layers",
    "clip_grad_norm": ".grads",
    "copy_to_tensor_model_parallel_region": ".mappings",
    "gather_from_sequence_parallel_region": ".mappings",
    "gather_from_tensor_model_parallel_region": ".mappings",
    "initialize_model_parallel": ".parallel_state",
    "load": ".checkpointing",
    "parallel_cross_entropy": ".loss_functions",
    "reduce_from_tensor_model_parallel_region": ".mappings",
    "reduce_scatter_to_sequence_parallel_region": ".mappings",
    "save": ".checkpointing",
    "scatter_to_sequence_parallel_region": ".mappings",
    "scatter_to_tensor_model_parallel_region": ".mappings",
}
_MODULES = (
    "checkpointing",
    "grads",
    "initialization",
    "layer_norm",
    "layers",
    "loss_functions",
    "mappings",
    "pad",
    "parallel_state",
    "random",
    "sequence_parallel",
    "utils",
)

if TYPE_CHECKING:
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
    "ColumnParallelLinear",
    "InputChannelParallelConv2d",
    "OutputChannelParallelConv2d",
    "ParallelEmbedding",
    "RowParallelLinear",
    "SPMDRank",
    "clip_grad_norm",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "initialize_model_parallel",
    "load",
    "parallel_cross_entropy",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "save",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES, _MODULES)
