"""Replace the modules that a plan names by parallel layers on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.distributed.model_plan import HEAD_AXES, Heads
from nxd_infer.distributed.regions import SEQUENCE_DIM
from nxd_infer.errors import ParallelConfigError
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


META = torch.device("meta")
Style = tuple[str, str]
"""A kind and an axis, as a plan gives them."""


@dataclass(frozen=True)
class Made:
    """What the new layers are made for."""

    heads: Heads
    sequence_parallel: bool


def replace_modules(model: nn.Module, found: Mapping[str, Style], made: Made) -> None:
    shared = tuple(f"{name}." for name, (kind, _) in found.items() if kind in ("attention", "shared"))
    done: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        kind, axis = found.get(name, ("", ""))
        if id(module) not in done:
            new = _parallel(module, kind, axis, name.startswith(shared) if shared else False, made)
            if new is None:
                continue
            done[id(module)] = new
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, done[id(module)])


def _parallel(module: Any, kind: str, axis: str, shared: bool, made: Made) -> nn.Module | None:
    """Return the parallel layer that takes the place of ``module``, on the meta device; None if it stays."""
    make = {
        "column": _column,
        "row": _row,
        "logits": _logits,
        "vocabulary": _vocabulary,
        "head_bias": _head_bias,
    }.get(kind)
    if make is None:
        return None
    new = make(module, axis, shared, made)
    for name, weight in new.named_parameters(recurse=False):
        weight.requires_grad_(getattr(module, name).requires_grad)
    return new.train(module.training)


def _linear_sizes(module: Any) -> tuple[int, int]:
    """Return the inputs and outputs of a linear layer. Raises ParallelConfigError if it is none."""
    if is_conv1d(module):
        return module.weight.shape[0], module.weight.shape[1]
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    raise ParallelConfigError(f"the plan splits {type(module).__name__}, which is not a linear layer")


def _gathered_along(axis: str) -> int:
    """Return the dimension along which ranks gather their pieces of the sequence for layers of this axis.

    Attention needs the sequence in order. Other layers treat every position alike, in any order, and some models give
    them no batch dimension.
    """
    return SEQUENCE_DIM if axis in HEAD_AXES else 0


def _column(module: Any, axis: str, shared: bool, made: Made) -> nn.Module:
    inputs, outputs = _linear_sizes(module)
    return (ColumnParallelConv1D if is_conv1d(module) else ColumnParallelLinear)(
        inputs,
        outputs,
        bias=module.bias is not None,
        gather_output=False,
        sequence_parallel_enabled=made.sequence_parallel and not shared,
        sequence_dimension=_gathered_along(axis),
        input_is_shared=shared,
        output_plan=made.heads.axis(axis, outputs),
        dtype=module.weight.dtype,
        device=META,
    )


def _row(module: Any, axis: str, shared: bool, made: Made) -> nn.Module:
    inputs, outputs = _linear_sizes(module)
    return (RowParallelConv1D if is_conv1d(module) else RowParallelLinear)(
        inputs,
        outputs,
        bias=module.bias is not None,
        input_is_parallel=True,
        sequence_parallel_enabled=made.sequence_parallel,
        sequence_dimension=_gathered_along(axis),
        input_plan=made.heads.axis(axis, inputs),
        dtype=module.weight.dtype,
        device=META,
    )


def _logits(module: Any, axis: str, shared: bool, made: Made) -> nn.Module:
    inputs, outputs = _linear_sizes(module)
    return ColumnParallelLinear(
        inputs,
        outputs,
        bias=module.bias is not None,
        gather_output=True,
        output_plan=AxisPlan.padded(outputs),
        dtype=module.weight.dtype,
        device=META,
    )


def _vocabulary(module: Any, axis: str, shared: bool, made: Made) -> nn.Module:
    if not hasattr(module, "embed_scale"):
        return _embedding(module, ParallelEmbedding)
    new = _embedding(module, ScaledParallelEmbedding)
    new.register_buffer("embed_scale", module.embed_scale, persistent=False)
    return new


def _head_bias(module: Any, axis: str, shared: bool, made: Made) -> nn.Module:
    return _embedding(module, ParallelEmbedding, shard_across_embedding=True, collect_output=False)


def _embedding(module: Any, kind: type[ParallelEmbedding], **how: Any) -> ParallelEmbedding:
    if not isinstance(module, nn.Embedding):
        raise ParallelConfigError(f"the plan splits {type(module).__name__}, which is not an embedding")
    return kind(
        module.num_embeddings,
        module.embedding_dim,
        padding_idx=module.padding_idx,
        max_norm=module.max_norm,
        norm_type=module.norm_type,
        scale_grad_by_freq=module.scale_grad_by_freq,
        sparse=module.sparse,
        pad=True,
        dtype=module.weight.dtype,
        device=META,
        **how,
    )
