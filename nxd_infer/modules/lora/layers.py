"""Layers with a low-rank update: ``y = base(x) + scaling * B(A(dropout(x)))``, at every tensor-parallel degree.

For a column-parallel base, A is replicated and B is split like the base's outputs; for a row-parallel base, A is split
like its inputs and B is replicated. The split factors are this package's parallel layers, so ranks exchange only
``rank`` numbers per row, and every gradient is that of the logical weight:

- A of a column-parallel base reads ``x`` outside the parallel region (the base enters it itself), and its output enters
  it, so A's gradient is complete on each rank;
- if a replicated factor has another input on each rank (a piece of the sequence, a partial sum, a shared input inside
  the region), its gradients are summed over the ranks (``ReplicatedLinear(summed=True)``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from nxd_infer import comm
from nxd_infer.context import ParallelContext, current_context, use_context
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan, restore_attributes
from nxd_infer.modules.lora.config import LoraConfig
from nxd_infer.modules.qkv_linear import PARTS, GQAQKVColumnParallelLinear
from nxd_infer.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear, mappings
from nxd_infer.parallel_layers.base import Fill, ParallelLayer, init_linear_weight, real_cpu_tensors

__all__ = ["LoraLayer", "Place", "ReplicatedLinear", "adaptable", "lora_layer"]

Place = tuple[ParallelContext, str]
"""A context, and the axis over which a layer is split."""


class ReplicatedLinear(nn.Module):
    """``x W^T`` with the full W ``[size_out, size_in]`` on every rank; ``summed``: see ``layers``."""

    def __init__(self, size_in: int, size_out: int, fill: Fill, place: Place, like: Tensor, summed: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=like.dtype, device=like.device))
        self.fill, self.summed = fill, summed
        self.context, self.axis = place
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.fill(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        if self.summed:
            weight = mappings.copy_to_tensor_model_parallel_region(
                weight, self.axis, context=self.context, reduce_dtype=torch.float32
            )
        return F.linear(x, weight)


class LoraLayer(nn.Module, ABC):
    """A frozen ``base_layer`` and the factors ``lora_A`` and ``lora_B``; exposes the attributes of the base.

    ``paths`` maps the parts of the base ("" if it has only one) to their logical projections in a checkpoint.
    """

    base_layer: nn.Module
    lora_A: nn.Module
    lora_B: nn.Module
    parts: tuple[str, ...] = ("",)
    embedding = False
    """Whether A is a table ``[vocabulary, rank]``, which PEFT stores transposed."""

    def __init__(self, base_layer: nn.Module, config: LoraConfig):
        super().__init__()
        self.base_layer = base_layer
        self.lora_rank, self.scaling, self.dropout = config.lora_rank, config.scaling, config.lora_dropout
        self.init_A: Fill = init_linear_weight
        if config.init_lora_weights == "gaussian":
            self.init_A = _Normal(1 / config.lora_rank)
        self.paths: dict[str, str] = {}
        self.base_weights: dict[str, nn.Parameter] = {}
        """The base's original weights, while merged weights replace them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_layer":
                raise
            return getattr(super().__getattr__("base_layer"), name)

    @property
    def place(self) -> Place:
        """The context and the axis over which the layer is split."""
        base = self.base_layer
        return (base.context, base.axis) if isinstance(base, ParallelLayer) else (current_context(), "tp")

    def factors(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        """Yield the part, A and B of each projection."""
        yield "", self.lora_A, self.lora_B

    def zero_at_first(self) -> Iterator[Tensor]:
        """Yield the factors that a new adapter begins with zeros in: the update is zero as long as they are."""
        for _, a, b in self.factors():
            yield (a if self.embedding else b).get_parameter("weight")

    # --- computation ----------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Any:
        """Return the base's output plus the update."""
        y = self.base_layer(x)
        if self.merged:
            if self.training and torch.is_grad_enabled():
                raise ParallelConfigError("the adapter is merged and would get no gradients: call unmerge() first")
            return y
        if isinstance(y, tuple):  # skip_bias_add
            return self.add(y[0], self.update(x)), *y[1:]
        return self.add(y, self.update(x))

    def update(self, x: Tensor) -> Tensor:
        return self.lora_B(self.lora_A(self.drop(x)))

    def add(self, y: Tensor, update: Tensor) -> Tensor:
        return y + self.scaling * update

    def drop(self, x: Tensor) -> Tensor:
        """Apply dropout with the full input's mask, drawn alike on every rank, whichever piece of it ``x`` is."""
        if not self.training or self.dropout == 0:
            return x
        mask = torch.ones(self.whole_shape(x), dtype=x.dtype, device=x.device)
        return x * self.own_piece(F.dropout(mask, self.dropout))

    def whole_shape(self, x: Tensor) -> list[int]:
        return list(x.shape)

    def own_piece(self, whole: Tensor) -> Tensor:
        return whole

    # --- merging ----------------------------------------------------------------------------------------

    @property
    def merged(self) -> bool:
        return bool(self.base_weights)

    @abstractmethod
    def deltas(self) -> dict[str, Tensor]:
        """Return the updates to this rank's weights, in float32 or wider, by name in ``base_layer``."""

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """Return this rank's weights plus the update, rounded once."""
        out = {}
        for name, delta in self.deltas().items():
            weight = self.base_weights.get(name, self.base_layer.get_parameter(name))
            out[name] = (weight.to(delta.dtype) + delta).to(weight.dtype)
        return out

    def merge(self) -> None:
        """Merge the update into the weights and keep the originals, so that ``unmerge`` is exact. Idempotent.

        A tied weight keeps its value in other layers.
        """
        if self.merged:
            return
        for name, merged in self.merged_weights().items():
            self.base_weights[name] = self.base_layer.get_parameter(name)
            self.base_layer.register_parameter(name, nn.Parameter(merged, requires_grad=False))
        restore_attributes(self.base_layer)

    def unmerge(self) -> None:
        """Restore the base's original weights. Does nothing if not merged."""
        for name, weight in self.base_weights.items():
            merged = self.base_layer.get_parameter(name)
            weight.data = weight.data.to(merged.device, merged.dtype)  # both may have been moved meanwhile
            self.base_layer.register_parameter(name, weight)
        self.base_weights = {}
        restore_attributes(self.base_layer)

    def wide(self, factor: nn.Module) -> Tensor:
        weight = factor.get_parameter("weight").detach()
        return weight.to(torch.promote_types(weight.dtype, torch.float32))


class _Normal:
    """Fills a tensor with normal numbers; a class, so that layers can be pickled."""

    def __init__(self, std: float):
        self.std = std

    def __call__(self, weight: Tensor) -> None:
        nn.init.normal_(weight, std=self.std)


class LoraLinear(LoraLayer):
    """LoRA for ``nn.Linear``."""

    base_layer: nn.Linear

    def __init__(self, base_layer: nn.Linear, config: LoraConfig):
        super().__init__(base_layer, config)
        like, base = base_layer.weight, base_layer
        summed = bool(getattr(like, "sequence_parallel_enabled", False))
        self.lora_A = ReplicatedLinear(base.in_features, self.lora_rank, self.init_A, self.place, like, summed)
        self.lora_B = ReplicatedLinear(self.lora_rank, base.out_features, nn.init.zeros_, self.place, like, summed)

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": self.scaling * self.wide(self.lora_B) @ self.wide(self.lora_A)}


class LoraEmbedding(LoraLayer):
    """LoRA for ``nn.Embedding``; without dropout, because the input is ids."""

    base_layer: nn.Embedding
    embedding = True

    def __init__(self, base_layer: nn.Embedding, config: LoraConfig):
        super().__init__(base_layer, config)
        base, like = base_layer, base_layer.weight
        self.summed = bool(getattr(like, "sequence_parallel_enabled", False))
        self.lora_A = _zero_table(base.num_embeddings, self.lora_rank, base.padding_idx, like)
        self.lora_B = ReplicatedLinear(
            self.lora_rank, base.embedding_dim, nn.init.normal_, self.place, like, self.summed
        )

    def drop(self, x: Tensor) -> Tensor:
        return x

    def update(self, x: Tensor) -> Tensor:
        (context, axis), table = self.place, self.lora_A.get_parameter("weight")
        if self.summed:
            table = mappings.copy_to_tensor_model_parallel_region(
                table, axis, context=context, reduce_dtype=torch.float32
            )
        return _as_output(self.lora_B(F.embedding(x, table, self.base_layer.padding_idx)), self.base_layer)

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": self.scaling * self.wide(self.lora_A) @ self.wide(self.lora_B).T}


def _as_output(update: Tensor, base: nn.Module) -> Tensor:
    """Multiply the update of a table as some models' embeddings (Gemma's) multiply what they find in it."""
    scale = getattr(base, "embed_scale", None)
    return update if scale is None else update * torch.as_tensor(scale).to(update.dtype)


def _zero_table(rows: int, columns: int, padding_idx: int | None, like: Tensor) -> nn.Embedding:
    zeros = torch.zeros(rows, columns, dtype=like.dtype, device=like.device)
    return nn.Embedding(rows, columns, padding_idx, _weight=zeros)


class LoraConv2d(LoraLayer):
    """LoRA for ``nn.Conv2d``: A is a convolution like the base with ``rank`` output channels, B a 1 x 1 convolution."""

    base_layer: nn.Conv2d

    def __init__(self, base_layer: nn.Conv2d, config: LoraConfig):
        super().__init__(base_layer, config)
        base = base_layer
        if base.groups != 1:
            raise ParallelConfigError(f"LoRA takes an nn.Conv2d with groups=1, got {base.groups}; do not target it")
        here: dict[str, Any] = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        size: Any = base.kernel_size
        self.lora_A = nn.utils.skip_init(
            nn.Conv2d,
            base.in_channels,
            self.lora_rank,
            size,
            stride=base.stride,
            padding=base.padding,
            dilation=base.dilation,
            padding_mode=base.padding_mode,
            **here,
        )
        self.lora_B = nn.utils.skip_init(nn.Conv2d, self.lora_rank, base.out_channels, 1, **here)
        with torch.no_grad():
            self.init_A(self.lora_A.get_parameter("weight"))
            nn.init.zeros_(self.lora_B.get_parameter("weight"))

    def deltas(self) -> dict[str, Tensor]:
        a, b = self.wide(self.lora_A), self.wide(self.lora_B)
        return {"weight": self.scaling * torch.einsum("or,rikl->oikl", b.flatten(1), a)}


class _OnSequence(LoraLayer):
    """LoRA for a layer whose input may be this rank's piece of the sequence."""

    base_layer: Any

    def whole_shape(self, x: Tensor) -> list[int]:
        shape = list(x.shape)
        if self.base_layer.sequence_parallel_enabled:
            shape[self.base_layer.sequence_dimension] *= self.base_layer.degree
        return shape

    def own_piece(self, whole: Tensor) -> Tensor:
        base = self.base_layer
        if not base.sequence_parallel_enabled:
            return whole
        return comm.shard(whole, base.context, base.axis, base.sequence_dimension)

    def column_factor(self, plan: AxisPlan, like: Tensor) -> ColumnParallelLinear:
        """Return B, split like the base's outputs ``plan``."""
        base = self.base_layer
        return ColumnParallelLinear(
            self.lora_rank,
            plan.size,
            bias=False,
            gather_output=base.gather_output,
            sequence_parallel_enabled=base.sequence_parallel_enabled,
            dtype=like.dtype,
            device=like.device,
            init_method=nn.init.zeros_,
            sequence_dimension=base.sequence_dimension,
            tensor_model_parallel_group=base.axis,
            reduce_dtype=base.reduce_dtype,
            output_plan=plan,
            input_is_shared=getattr(base, "input_is_shared", False),
        )


def _as_weight(delta: Tensor, base: nn.Module) -> Tensor:
    return delta.T if getattr(base, "transposed", False) else delta


class LoraColumnParallelLinear(_OnSequence):
    """LoRA for ColumnParallelLinear: A replicated, B split by rows."""

    base_layer: ColumnParallelLinear

    def __init__(self, base_layer: ColumnParallelLinear, config: LoraConfig):
        super().__init__(base_layer, config)
        base, like = base_layer, base_layer.weight
        summed = base.sequence_parallel_enabled or base.input_is_shared
        self.lora_A = ReplicatedLinear(base.input_size, self.lora_rank, self.init_A, self.place, like, summed)
        self.lora_B = self.column_factor(base.output_plan, like)

    def add(self, y: Tensor, update: Tensor) -> Tensor:
        padding = y.shape[-1] - update.shape[-1]  # keep_padded_output
        return super().add(y, F.pad(update, (0, padding)) if padding else update)

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": _as_weight(self.scaling * self.wide(self.lora_B) @ self.wide(self.lora_A), self.base_layer)}


class LoraGQAQKVColumnParallelLinear(_OnSequence):
    """LoRA for GQAQKVColumnParallelLinear: a pair of factors for each targeted projection of q, k and v."""

    base_layer: GQAQKVColumnParallelLinear

    def __init__(self, base_layer: GQAQKVColumnParallelLinear, config: LoraConfig, parts: tuple[str, ...] = PARTS):
        super().__init__(base_layer, config)
        base, self.parts = base_layer, parts
        like = base.get_parameter(base._parameter_names("weight")[0])
        size, summed = base.input_size, base.sequence_parallel_enabled
        self.lora_A = nn.ModuleDict(
            {part: ReplicatedLinear(size, self.lora_rank, self.init_A, self.place, like, summed) for part in parts}
        )
        self.lora_B = nn.ModuleDict({part: self.column_factor(base._plan(part), like) for part in parts})

    def factors(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        for part in self.parts:
            yield part, self.lora_A.get_submodule(part), self.lora_B.get_submodule(part)

    def forward(self, x: Tensor) -> Any:
        if self.merged:
            return super().forward(x)
        outputs: dict[str, Tensor] = dict(zip(PARTS, self.base_layer(x), strict=True))
        dropped = self.drop(x)
        for part, a, b in self.factors():
            outputs[part] = self.add(outputs[part], self._as_wide(b(a(dropped)), outputs[part].shape[-1]))
        return tuple(outputs.values())

    def _as_wide(self, update: Tensor, width: int) -> Tensor:
        """Repeat heads as the base does, with ``gather_output`` and copies of heads."""
        return update if update.shape[-1] == width else self.base_layer.with_copies(update)

    def deltas(self) -> dict[str, Tensor]:
        base, found = self.base_layer, {}
        for part, a, b in self.factors():
            found[part] = self.scaling * self.wide(b) @ self.wide(a)
        if not base.fuse_qkv:
            return {f"weight_{part}": delta for part, delta in found.items()}
        like, kv = next(iter(found.values())), base.kv_output_size_per_partition
        sizes = {"q": base.q_output_size_per_partition, "k": kv, "v": kv}
        return {"weight_qkv": torch.cat([found.get(p, like.new_zeros(sizes[p], base.input_size)) for p in PARTS])}


class LoraRowParallelLinear(LoraLayer):
    """LoRA for RowParallelLinear: A split by columns, B replicated. The ranks' results are summed between the two."""

    base_layer: RowParallelLinear

    def __init__(self, base_layer: RowParallelLinear, config: LoraConfig):
        super().__init__(base_layer, config)
        base, like = base_layer, base_layer.weight
        self.lora_A = RowParallelLinear(
            base.input_plan.size,
            self.lora_rank,
            bias=False,
            input_is_parallel=base.input_is_parallel,
            sequence_parallel_enabled=base.sequence_parallel_enabled,
            dtype=like.dtype,
            device=like.device,
            init_method=self.init_A,
            sequence_dimension=base.sequence_dimension,
            reduce_output=base.reduce_output,
            tensor_model_parallel_group=base.axis,
            reduce_dtype=base.reduce_dtype,
            input_plan=base.input_plan,
        )
        summed = base.sequence_parallel_enabled or not base.reduce_output
        self.lora_B = ReplicatedLinear(self.lora_rank, base.output_size, nn.init.zeros_, self.place, like, summed)
        with real_cpu_tensors():
            self.own_inputs = base.input_plan.rank_index(base.degree, base.rank)

    def whole_shape(self, x: Tensor) -> list[int]:
        return [*x.shape[:-1], self.base_layer.input_plan.size if self.base_layer.input_is_parallel else x.shape[-1]]

    def own_piece(self, whole: Tensor) -> Tensor:
        if not self.base_layer.input_is_parallel:
            return whole
        return F.pad(whole, (0, 1)).index_select(-1, self.own_inputs.to(whole.device))

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": _as_weight(self.scaling * self.wide(self.lora_B) @ self.wide(self.lora_A), self.base_layer)}


class LoraParallelEmbedding(LoraLayer):
    """LoRA for ParallelEmbedding: A is split with the vocabulary, or B with the embedding dimension."""

    base_layer: ParallelEmbedding
    embedding = True

    def __init__(self, base_layer: ParallelEmbedding, config: LoraConfig):
        super().__init__(base_layer, config)
        base, like = base_layer, base_layer.weight
        if base.shard_across_embedding:
            self.lora_A = _zero_table(base.num_embeddings, self.lora_rank, base.padding_idx, like)
            self.lora_B = ColumnParallelLinear(
                self.lora_rank,
                base.plan.size,
                bias=False,
                gather_output=base.collect_output,
                dtype=like.dtype,
                device=like.device,
                init_method=nn.init.normal_,
                tensor_model_parallel_group=base.axis,
                output_plan=base.plan,
            )
            return
        self.lora_A = ParallelEmbedding(
            base.num_embeddings,
            self.lora_rank,
            nn.init.zeros_,
            like.dtype,
            like.device,
            padding_idx=base.padding_idx,
            pad=base.pad_size > 0,
            sequence_parallel_enabled=base.sequence_parallel_enabled,
            sequence_dimension=base.sequence_dimension,
            collect_output=base.collect_output,
            tensor_model_parallel_group=base.axis,
        )
        summed = base.sequence_parallel_enabled or not base.collect_output
        self.lora_B = ReplicatedLinear(self.lora_rank, base.embedding_dim, nn.init.normal_, self.place, like, summed)

    def drop(self, x: Tensor) -> Tensor:
        return x

    def update(self, x: Tensor) -> Tensor:
        base, update = self.base_layer, _as_output(super().update(x), self.base_layer)
        if base.shard_across_embedding and base.sequence_parallel_enabled:
            return mappings.scatter_to_sequence_parallel_region(
                update, base.sequence_dimension, base.axis, context=base.context
            )
        return update

    def deltas(self) -> dict[str, Tensor]:
        return {"weight": self.scaling * self.wide(self.lora_A) @ self.wide(self.lora_B).T}


LAYERS: dict[type[nn.Module], Callable[..., LoraLayer]] = {
    GQAQKVColumnParallelLinear: LoraGQAQKVColumnParallelLinear,
    ColumnParallelLinear: LoraColumnParallelLinear,
    RowParallelLinear: LoraRowParallelLinear,
    ParallelEmbedding: LoraParallelEmbedding,
    nn.Linear: LoraLinear,
    nn.Embedding: LoraEmbedding,
    nn.Conv2d: LoraConv2d,
}


def adaptable(module: nn.Module) -> bool:
    """Return whether there is a LoRA layer for the module."""
    return isinstance(module, tuple(LAYERS)) and not isinstance(module, NonDynamicallyQuantizableLinear)


def lora_layer(module: nn.Module, config: LoraConfig, *parts: tuple[str, ...]) -> LoraLayer:
    """Return the LoRA layer for ``module``, whose parameters are frozen. ``parts``: which of q, k, v, if fused."""
    make = next(make for kind, make in LAYERS.items() if isinstance(module, kind))
    context = module.context if isinstance(module, ParallelLayer) else current_context()
    with use_context(context):
        return make(module, config, *parts)
