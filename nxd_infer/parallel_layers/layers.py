"""The parallel layers, under the module path that ported code imports."""

from nxd_infer.parallel_layers.base import ParallelLayer as BaseParallelLayer
from nxd_infer.parallel_layers.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from nxd_infer.parallel_layers.embedding import ParallelEmbedding
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.spmd_rank import SPMDRank

__all__ = [
    "BaseParallelLayer",
    "ColumnParallelLinear",
    "InputChannelParallelConv2d",
    "OutputChannelParallelConv2d",
    "ParallelEmbedding",
    "RowParallelLinear",
    "SPMDRank",
]
