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

from collections.abc import Callable, Iterator
from functools import partial
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
        return F.linear(x, _summed(self.weight, (self.context, self.axis)) if self.summed else self.weight)


def _summed(weight: Tensor, place: Place) -> Tensor:
    """Return a weight whose gradients are summed over the ranks."""
    context, axis = place
    return mappings.copy_to_tensor_model_parallel_region(weight, axis, context=context, reduce_dtype=torch.float32)


class LoraLayer(nn.Module):
    """A frozen ``base_layer`` and the factors ``lora_A`` and ``lora_B``; exposes the attributes of the base.

    ``paths`` maps the parts of the base ("" if it has only one) to their logical projections in a checkpoint.
    """

    base_layer: nn.Module
    lora_A: nn.Module
    lora_B: nn.Module
    parts: tuple[str, ...] = ("",)
    embedding = False
    """Whether A is a table ``[vocabulary, rank]``, which PEFT stores transposed, and the input ids."""

    def __init__(self, base_layer: nn.Module, config: LoraConfig):
        super().__init__()
        self.base_layer = base_layer
        self.lora_rank, self.scaling, self.dropout = config.lora_rank, config.scaling, config.lora_dropout
        gaussian = partial(nn.init.normal_, std=1 / config.lora_rank)
        self.init_A: Fill = gaussian if config.init_lora_weights == "gaussian" else init_linear_weight
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

    # --- the factors ------------------------------------------------------------------------------------

    @property
    def like(self) -> Tensor:
        """The base's weight, whose dtype and device the factors have."""
        base = self.base_layer
        return next(param for name, param in base.named_parameters(recurse=False) if name.startswith("weight"))

    def replicated(self, size_in: int, size_out: int, fill: Fill, summed: bool) -> ReplicatedLinear:
        return ReplicatedLinear(size_in, size_out, fill, self.place, self.like, summed)

    def as_split(self) -> dict[str, Any]:
        """Return the options of a factor that is split as the base is."""
        base: Any = self.base_layer
        options: dict[str, Any] = {"dtype": self.like.dtype, "device": self.like.device}
        options["tensor_model_parallel_group"] = base.axis
        for name in ("sequence_parallel_enabled", "sequence_dimension", "reduce_dtype"):
            if hasattr(base, name):
                options[name] = getattr(base, name)
        return options

    def zero_table(self, padding_idx: int | None, rows: int) -> nn.Embedding:
        zeros = torch.zeros(rows, self.lora_rank, dtype=self.like.dtype, device=self.like.device)
        return nn.Embedding(rows, self.lora_rank, padding_idx, _weight=zeros)

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
        if self.embedding or not self.training or self.dropout == 0:
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

    def deltas(self) -> dict[str, Tensor]:
        """Return the updates to this rank's weights, in float32 or wider, by name in ``base_layer``."""
        delta = self.delta(self.lora_A, self.lora_B)
        return {"weight": delta.T if getattr(self.base_layer, "transposed", False) else delta}

    def delta(self, a: nn.Module, b: nn.Module) -> Tensor:
        wide_a, wide_b = _wide(a), _wide(b)
        return self.scaling * (wide_a @ wide_b.T if self.embedding else wide_b @ wide_a)

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


def _wide(factor: nn.Module) -> Tensor:
    weight = factor.get_parameter("weight").detach()
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


class LoraLinear(LoraLayer):
    """LoRA for ``nn.Linear``."""

    base_layer: nn.Linear

    def __init__(self, base_layer: nn.Linear, config: LoraConfig):
        super().__init__(base_layer, config)
        summed = bool(getattr(base_layer.weight, "sequence_parallel_enabled", False))
        self.lora_A = self.replicated(base_layer.in_features, self.lora_rank, self.init_A, summed)
        self.lora_B = self.replicated(self.lora_rank, base_layer.out_features, nn.init.zeros_, summed)


class LoraEmbedding(LoraLayer):
    """LoRA for ``nn.Embedding``."""

    base_layer: nn.Embedding
    embedding = True

    def __init__(self, base_layer: nn.Embedding, config: LoraConfig):
        super().__init__(base_layer, config)
        self.summed = bool(getattr(base_layer.weight, "sequence_parallel_enabled", False))
        self.lora_A = self.zero_table(base_layer.padding_idx, base_layer.num_embeddings)
        self.lora_B = self.replicated(self.lora_rank, base_layer.embedding_dim, nn.init.normal_, self.summed)

    def update(self, x: Tensor) -> Tensor:
        table = self.lora_A.get_parameter("weight")
        table = _summed(table, self.place) if self.summed else table
        return _as_output(self.lora_B(F.embedding(x, table, self.base_layer.padding_idx)), self.base_layer)


def _as_output(update: Tensor, base: nn.Module) -> Tensor:
    """Multiply the update of a table as some models' embeddings (Gemma's) multiply what they find in it."""
    scale = getattr(base, "embed_scale", None)
    return update if scale is None else update * torch.as_tensor(scale).to(update.dtype)


class LoraConv2d(LoraLayer):
    """LoRA for ``nn.Conv2d``: A is a convolution like the base with ``rank`` output channels, B a 1 x 1 convolution."""

    base_layer: nn.Conv2d

    def __init__(self, base_layer: nn.Conv2d, config: LoraConfig):
        super().__init__(base_layer, config)
        base = base_layer
        if base.groups != 1:
            raise ParallelConfigError(f"LoRA takes an nn.Conv2d with groups=1, got {base.groups}; do not target it")
        here: dict[str, Any] = {"bias": False, "dtype": base.weight.dtype, "device": base.weight.device}
        geometry = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
        as_base: dict[str, Any] = {name: getattr(base, name) for name in geometry}
        self.lora_A = nn.utils.skip_init(nn.Conv2d, base.in_channels, self.lora_rank, **as_base, **here)
        self.lora_B = nn.utils.skip_init(nn.Conv2d, self.lora_rank, base.out_channels, 1, **here)
        with torch.no_grad():
            self.init_A(self.lora_A.get_parameter("weight"))
            nn.init.zeros_(self.lora_B.get_parameter("weight"))

    def deltas(self) -> dict[str, Tensor]:
        a, b = _wide(self.lora_A), _wide(self.lora_B)
        return {"weight": self.scaling * torch.einsum("or,rikl->oikl", b.flatten(1), a)}


class _OnSequence(LoraLayer):
    """LoRA for a layer with split outputs, whose input may be this rank's piece of the sequence."""

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

    def split(self, plan: AxisPlan) -> ColumnParallelLinear:
        """Return B, split like the base's outputs ``plan``."""
        base = self.base_layer
        return ColumnParallelLinear(
            self.lora_rank,
            plan.size,
            bias=False,
            gather_output=base.gather_output,
            init_method=nn.init.zeros_,
            output_plan=plan,
            input_is_shared=getattr(base, "input_is_shared", False),
            **self.as_split(),
        )


class LoraColumnParallelLinear(_OnSequence):
    """LoRA for ColumnParallelLinear: A replicated, B split by rows."""

    base_layer: ColumnParallelLinear

    def __init__(self, base_layer: ColumnParallelLinear, config: LoraConfig):
        super().__init__(base_layer, config)
        summed = base_layer.sequence_parallel_enabled or base_layer.input_is_shared
        self.lora_A = self.replicated(base_layer.input_size, self.lora_rank, self.init_A, summed)
        self.lora_B = self.split(base_layer.output_plan)

    def add(self, y: Tensor, update: Tensor) -> Tensor:
        padding = y.shape[-1] - update.shape[-1]  # keep_padded_output
        return super().add(y, F.pad(update, (0, padding)) if padding else update)


class LoraGQAQKVColumnParallelLinear(_OnSequence):
    """LoRA for GQAQKVColumnParallelLinear: a pair of factors for each targeted projection of q, k and v."""

    base_layer: GQAQKVColumnParallelLinear

    def __init__(self, base_layer: GQAQKVColumnParallelLinear, config: LoraConfig, parts: tuple[str, ...] = PARTS):
        super().__init__(base_layer, config)
        base, self.parts = base_layer, parts
        size, summed = base.input_size, base.sequence_parallel_enabled
        self.lora_A = nn.ModuleDict(
            {part: self.replicated(size, self.lora_rank, self.init_A, summed) for part in parts}
        )
        self.lora_B = nn.ModuleDict({part: self.split(base._plan(part)) for part in parts})

    def factors(self) -> Iterator[tuple[str, nn.Module, nn.Module]]:
        for part in self.parts:
            yield part, self.lora_A.get_submodule(part), self.lora_B.get_submodule(part)

    def forward(self, x: Tensor) -> Any:
        if self.merged:
            return super().forward(x)
        outputs: dict[str, Tensor] = dict(zip(PARTS, self.base_layer(x), strict=True))
        dropped = self.drop(x)
        for part, a, b in self.factors():
            update = b(a(dropped))
            if update.shape[-1] != outputs[part].shape[-1]:  # the base has gathered its copies of heads
                update = self.base_layer.with_copies(update)
            outputs[part] = self.add(outputs[part], update)
        return tuple(outputs.values())

    def deltas(self) -> dict[str, Tensor]:
        base = self.base_layer
        by_part = {part: self.delta(a, b) for part, a, b in self.factors()}
        if not base.fuse_qkv:
            return {f"weight_{part}": delta for part, delta in by_part.items()}
        like, kv = next(iter(by_part.values())), base.kv_output_size_per_partition
        sizes = {"q": base.q_output_size_per_partition, "k": kv, "v": kv}
        return {"weight_qkv": torch.cat([by_part.get(p, like.new_zeros(sizes[p], base.input_size)) for p in PARTS])}


class LoraRowParallelLinear(LoraLayer):
    """LoRA for RowParallelLinear: A split by columns, B replicated. The ranks' results are summed between the two."""

    base_layer: RowParallelLinear

    def __init__(self, base_layer: RowParallelLinear, config: LoraConfig):
        super().__init__(base_layer, config)
        base = base_layer
        self.lora_A = RowParallelLinear(
            base.input_plan.size,
            self.lora_rank,
            bias=False,
            input_is_parallel=base.input_is_parallel,
            init_method=self.init_A,
            reduce_output=base.reduce_output,
            input_plan=base.input_plan,
            **self.as_split(),
        )
        summed = base.sequence_parallel_enabled or not base.reduce_output
        self.lora_B = self.replicated(self.lora_rank, base.output_size, nn.init.zeros_, summed)
        with real_cpu_tensors():
            self.own_inputs = base.input_plan.rank_index(base.degree, base.rank)

    def whole_shape(self, x: Tensor) -> list[int]:
        return [*x.shape[:-1], self.base_layer.input_plan.size if self.base_layer.input_is_parallel else x.shape[-1]]

    def own_piece(self, whole: Tensor) -> Tensor:
        if not self.base_layer.input_is_parallel:
            return whole
        return F.pad(whole, (0, 1)).index_select(-1, self.own_inputs.to(whole.device))


class LoraParallelEmbedding(LoraLayer):
    """LoRA for ParallelEmbedding: A is split with the vocabulary, or B with the embedding dimension."""

    base_layer: ParallelEmbedding
    embedding = True

    def __init__(self, base_layer: ParallelEmbedding, config: LoraConfig):
        super().__init__(base_layer, config)
        base, options = base_layer, self.as_split()
        if base.shard_across_embedding:
            self.lora_A = self.zero_table(base.padding_idx, base.num_embeddings)
            self.lora_B = ColumnParallelLinear(
                self.lora_rank,
                base.plan.size,
                bias=False,
                gather_output=base.collect_output,
                init_method=nn.init.normal_,
                output_plan=base.plan,
                **{**options, "sequence_parallel_enabled": False},
            )
            return
        self.lora_A = ParallelEmbedding(
            base.num_embeddings,
            self.lora_rank,
            nn.init.zeros_,
            padding_idx=base.padding_idx,
            pad=base.pad_size > 0,
            collect_output=base.collect_output,
            **options,
        )
        summed = base.sequence_parallel_enabled or not base.collect_output
        self.lora_B = self.replicated(self.lora_rank, base.embedding_dim, nn.init.normal_, summed)

    def update(self, x: Tensor) -> Tensor:
        base = self.base_layer
        if base.sequence_first and x.dim() == 2:
            x = x.transpose(0, 1)
        update = _as_output(super().update(x), base)
        if base.shard_across_embedding and base.sequence_parallel_enabled:
            return mappings.scatter_to_sequence_parallel_region(
                update, base.sequence_dimension, base.axis, context=base.context
            )
        return update


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
