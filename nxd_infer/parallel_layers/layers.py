"""The parallel layers by the module path that ported code imports them from."""

from nxd_infer.parallel_layers.base import ParallelLayer as BaseParallelLayer
from nxd_infer.parallel_layers.embedding import ParallelEmbedding
from nxd_infer.parallel_layers.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "BaseParallelLayer",
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
]
