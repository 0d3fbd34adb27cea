"""An embedding whose table is split over the tensor-parallel ranks, by vocabulary or by embedding dimension.

Source: API guide, "Parallel Embedding"; the options after ``device`` are those of ``nn.Embedding`` and the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import init

from nxd_infer import comm
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers import mappings
from nxd_infer.parallel_layers.base import (
    DeviceLike,
    ParallelLayer,
    device_of,
    require_inside,
    size_plan,
    whole_size,
)
from nxd_infer.util.also_called import also_called


class ParallelEmbedding(ParallelLayer):
    """``nn.Embedding`` with its table split over the ranks.

    Args:
        num_embeddings, embedding_dim: logical sizes of the table.
        init_method: fills the *logical* ``[num_embeddings, embedding_dim]`` table in place.
        dtype, device: of the table. The output has the same dtype at every degree.
        padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse: as in ``nn.Embedding``.
        shard_across_embedding: split the embedding dimension instead of the vocabulary.
        pad: pad the split dimension to a multiple of the degree.
        sequence_parallel_enabled: return this rank's piece of the sequence.
        sequence_dimension: dimension of the sequence. None, as in the reference: ids [batch, sequence] give this rank's
            piece of [sequence, batch, embedding_dim]; ids of other dimensions have the sequence first.
        collect_output: False returns this rank's part: a partial sum, or its slice of the embedding dimension.
        tensor_model_parallel_group: None, an axis name, or a group of ``parallel_state``.
        use_spmd_rank: accepted, no effect; the rank is always data here, so all ranks export the same graph.

    By place the arguments are also taken in the reference's order: ``padding_idx``, a number or None, comes third.

    Ids are ``[...]`` int64 or int32, the result is ``[..., embedding_dim]``. An id outside the vocabulary raises
    IndexError at every degree (a device-side assertion on CUDA; an exported graph does not check).
    """

    weight: nn.Parameter
    is_head: bool = False
    """Whether the model's head reads the table, too, without a name of its own for it."""

    @also_called(
        "self num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse init_method device "
        "dtype shard_across_embedding pad sequence_parallel_enabled tensor_model_parallel_group use_spmd_rank "
        "sequence_dimension tile_cc rank_ordering collect_output",
        when=lambda given: len(given) > 3 and (given[3] is None or isinstance(given[3], int)),
        ignored="tile_cc use_spmd_rank",
        neutral={"rank_ordering": None},
    )
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: Callable[[Tensor], object] = init.normal_,
        dtype: torch.dtype = torch.float32,
        device: DeviceLike = None,
        *,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        collect_output: bool = True,
        tensor_model_parallel_group: object = None,
    ):
        super().__init__(tensor_model_parallel_group)
        if not callable(init_method):
            raise ParallelConfigError(
                f"ParallelEmbedding: init_method must be callable, got {init_method!r}; "
                "the third argument is padding_idx, a number or None, or init_method, a function"
            )
        if whole_size(num_embeddings) < 1:
            raise ParallelConfigError(f"ParallelEmbedding: num_embeddings must be at least 1, got {num_embeddings}")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ParallelConfigError(
                f"ParallelEmbedding: padding_idx {padding_idx} is outside the vocabulary of {num_embeddings}"
            )
        if sequence_parallel_enabled and not collect_output:
            raise ParallelConfigError(
                "ParallelEmbedding: sequence_parallel_enabled=True returns a summed piece of the sequence; "
                "pass collect_output=True"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.init_method = init_method
        self.padding_idx = padding_idx if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type = max_norm, float(norm_type)
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.shard_across_embedding = shard_across_embedding
        self.pad = pad
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.sequence_dimension = self.sequence_dim = sequence_dimension or 0
        self.sequence_first = bool(sequence_parallel_enabled) and sequence_dimension is None
        """Whether ids [batch, sequence] are turned around."""
        self.collect_output = collect_output
        self.weight_partition_dim = 1 if shard_across_embedding else 0
        self.plan = size_plan(embedding_dim if shard_across_embedding else num_embeddings, pad=pad)
        self.plans_changed()
        self.new_parameter("weight", dtype, device_of(device))
        self.reset_parameters()

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        return (self.num_embeddings, self.plan) if self.shard_across_embedding else (self.plan, self.embedding_dim)

    def plans_changed(self) -> None:
        local = self.plan.local_size(self.degree)
        self.pad_size = self.plan.padded_size(self.degree) - self.plan.size
        self.num_embeddings_per_partition = self.num_embeddings if self.shard_across_embedding else local
        self.embedding_dim_per_partition = local if self.shard_across_embedding else self.embedding_dim
        self.use_index("output_index", self.gather_index_of(self.plan) if self.shard_across_embedding else None)
        if not self.shard_across_embedding and not self._in_order(self.plan):
            raise ParallelConfigError("ParallelEmbedding: a split vocabulary must be on the ranks in order")

    def init_weight_cpu(self) -> None:
        """Fill the table, as :meth:`reset_parameters` does."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the table the logical values that ``nn.Embedding`` would have after the same seed."""

        def fill(table: Tensor) -> None:
            self.init_method(table)
            if self.padding_idx is not None:
                table[self.padding_idx].zero_()

        self.init_parameter("weight", fill)

    def forward(self, input: Tensor) -> Tensor:
        """Map ids ``[...]`` to ``[..., embedding_dim]``; see the class."""
        what = "embedding_dim" if self.shard_across_embedding else "num_embeddings"
        self.require_divisible(what, self.plan)
        if self.sequence_first and input.dim() == 2:
            input = input.transpose(0, 1)
        here = {"process_group": self.axis, "context": self.context}
        if self.degree == 1 or self.shard_across_embedding:
            # It concerns the gradient alone, of which a graph has none.
            y = self._look_up(input, None if torch.compiler.is_exporting() else self.padding_idx)
            if self.shard_across_embedding and self.collect_output:
                y = self.gather_output_features(y, self.plan, "output_index")
            if self.sequence_parallel_enabled:
                y = mappings.scatter_to_sequence_parallel_region(y, self.sequence_dimension, **here)
            return y
        y = self._look_up_own(input)
        if self.sequence_parallel_enabled:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, self.sequence_dimension, **here)
        # A sum of one value and zeros is exact in every dtype, so the table's dtype will do.
        return mappings.reduce_from_tensor_model_parallel_region(y, **here) if self.collect_output else y

    def _look_up(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        """Look up ids in this rank's table, counted from its first row."""
        max_norm = self.max_norm
        if max_norm is not None and torch.compiler.is_exporting():  # a graph must not change its weights
            y = F.embedding(ids, self.weight)
            return (y * self._shortening(y, max_norm)).to(y.dtype)
        if max_norm is not None and self.shard_across_embedding and self.degree > 1:
            with torch.no_grad():
                rows = torch.unique(ids)
                values = self.weight.detach()[rows]
                self.weight.detach()[rows] = (values * self._shortening(values, max_norm)).to(values.dtype)
            max_norm = None
        return F.embedding(
            ids, self.weight, padding_idx, max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )

    def _shortening(self, rows: Tensor, max_norm: float) -> Tensor:
        """Return the factors ``[..., 1]`` that limit each row to ``max_norm``; the norm covers all ranks of a row."""
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        if self.shard_across_embedding and self.degree > 1 and math.isinf(self.norm_type):
            norm = comm.all_reduce(rows.abs().amax(-1, keepdim=True), self.context, self.axis, "max")
        elif self.shard_across_embedding and self.degree > 1:
            power = rows.abs().pow(self.norm_type).sum(-1, keepdim=True)
            norm = comm.all_reduce(power, self.context, self.axis).pow(1 / self.norm_type)
        else:
            norm = rows.norm(self.norm_type, -1, keepdim=True)
        return torch.where(norm > max_norm, max_norm / (norm + 1e-7), torch.ones_like(norm))

    def _look_up_own(self, ids: Tensor) -> Tensor:
        """Look up the ids that this rank holds; other ids give zeros."""
        rows = self.num_embeddings_per_partition
        first = comm.axis_rank(self.context, self.axis, ids.device) * rows
        local = ids - first
        own = (local >= 0) & (local < rows)
        if torch.compiler.is_exporting():
            y = self._look_up(local.masked_fill(~own, 0), None)
            return y.masked_fill(~own.unsqueeze(-1), 0)
        require_inside(ids, self.num_embeddings, "id")
        padding_idx = None
        if self.padding_idx is not None and 0 <= self.padding_idx - self.rank * rows < rows:
            padding_idx = self.padding_idx - self.rank * rows
        if self.max_norm is None and not self.scale_grad_by_freq and not self.sparse:
            y = F.embedding(local.masked_fill(~own, 0), self.weight, padding_idx)
            return y.masked_fill(~own.unsqueeze(-1), 0)
        # These options count or change the looked-up rows, so look up only this rank's.
        y = self._look_up(local[own], padding_idx)
        return y.new_zeros((*ids.shape, self.embedding_dim)).index_put((own,), y)

    def extra_repr(self) -> str:
        how = "embedding" if self.shard_across_embedding else "vocabulary"
        return f"{self.num_embeddings}, {self.embedding_dim}, split={how}, {self.axis}={self.degree}"
