"""The parallel layers, under the module path that ported code imports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer import comm
from nxd_infer.context import current_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.parallel_layers.base import ParallelLayer as BaseParallelLayer
from nxd_infer.parallel_layers.conv import InputChannelParallelConv2d, OutputChannelParallelConv2d
from nxd_infer.parallel_layers.embedding import ParallelEmbedding
from nxd_infer.parallel_layers.linear import BaseParallelLinear, ColumnParallelLinear, RowParallelLinear
from nxd_infer.parallel_layers.mappings import axis_of
from nxd_infer.parallel_layers.utils import divide

__all__ = [
    "BaseParallelLayer", "BaseParallelLinear", "ColumnParallelLinear", "InputChannelParallelConv2d",
    "OutputChannelParallelConv2d", "ParallelEmbedding", "RowParallelLinear", "SPMDRank", "create_local_weight",
]  # fmt: skip


def create_local_weight(
    full_weight: Tensor,
    partition_dim: int,
    per_partition_size: int,
    stride: int,
    out_weight: Tensor | None = None,
) -> Tensor:
    """Return this tensor-parallel rank's part of a whole weight: ``per_partition_size`` of dimension ``partition_dim``.

    The dimension consists of ``stride`` blocks, of each of which a rank has a piece. ``out_weight``: where to copy it,
    which is then returned. Raises ShardingError if the size does not divide by ``stride``.
    """
    tp = current_context().tp
    pieces = full_weight.split(divide(per_partition_size, stride), partition_dim)
    own = torch.cat(pieces[tp.rank :: tp.degree], partition_dim)
    if out_weight is None:
        return own
    with torch.no_grad():
        return out_weight.copy_(own)


class SPMDRank(nn.Module):
    """``get_rank()`` returns this rank's index on the axis as a tensor, so all ranks export the same graph.

    The reference keeps the rank as a parameter ``rank``, which its checkpoints must contain. Here it is an operator:
    nothing is saved, and a ``rank`` in a state dict is ignored.

    Raises ParallelConfigError if ``world_size`` differs from the degree of the axis.
    """

    def __init__(
        self,
        world_size: int | None = None,
        tensor_model_parallel_size: int | None = None,
        *,
        tensor_model_parallel_group: object = None,
    ):
        super().__init__()
        self.context = current_context()
        self.axis = axis_of(tensor_model_parallel_group, self.context)
        expected = world_size if tensor_model_parallel_size is None else tensor_model_parallel_size
        degree = self.context.axis(self.axis).degree
        if expected is not None and expected != degree:
            raise ParallelConfigError(f"SPMDRank over {expected} ranks, but the {self.axis} degree is {degree}")

    def get_rank(self) -> Tensor:
        """Return the rank, int32 [1]."""
        return comm.axis_rank(self.context, self.axis).to(torch.int32).reshape(1)

    def forward(self) -> Tensor:
        return self.get_rank()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        unexpected = args[3]
        if f"{prefix}rank" in unexpected:
            unexpected.remove(f"{prefix}rank")
