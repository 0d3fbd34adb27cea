"""Parallel layers for modules that only transformers has."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear


class ColumnParallelConv1D(ColumnParallelLinear):
    """ColumnParallelLinear whose weight is ``[in, out]``, as that of transformers' ``Conv1D``."""

    transposed = True

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        axes = super().axes_of(name)
        return axes[::-1] if name == "weight" else axes

    def _matrix(self) -> Tensor:
        return self.logical(self.weight, self.elements, dim=1).T


class RowParallelConv1D(RowParallelLinear):
    """RowParallelLinear whose weight is ``[in, out]``, as that of transformers' ``Conv1D``."""

    transposed = True

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        axes = super().axes_of(name)
        return axes[::-1] if name == "weight" else axes

    def _matrix(self) -> Tensor:
        return self.logical(self.weight, self.elements).T


class ScaledParallelEmbedding(ParallelEmbedding):
    """ParallelEmbedding whose result is multiplied by ``embed_scale``, as Gemma's embeddings are."""

    embed_scale: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        return y * self.embed_scale.to(y.dtype)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether ``module`` is transformers' linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")
