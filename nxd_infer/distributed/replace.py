"""Replace the modules that a plan names by parallel layers on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nxd_infer.distributed.model_plan import HEAD_AXES, Heads
from nxd_infer.distributed.regions import SEQUENCE_DIM
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import AxisPlan
from nxd_infer.parallel_layers.base import ParallelLayer
from nxd_infer.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear


class _Transposed(ParallelLayer):
    """Whose weight is ``[in, out]``, as that of transformers' ``Conv1D``."""

    transposed = True

    def axes_of(self, name: str) -> Sequence[AxisPlan | int]:
        axes = super().axes_of(name)
        return axes[::-1] if name == "weight" else axes


class ColumnParallelConv1D(_Transposed, ColumnParallelLinear):
    """ColumnParallelLinear of a transposed weight."""

    def _matrix(self) -> Tensor:
        return self.logical(self.weight, self.elements, dim=1).T


class RowParallelConv1D(_Transposed, RowParallelLinear):
    """RowParallelLinear of a transposed weight."""

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


def replace_modules(model: nn.Module, found: Mapping[str, Style], heads: Heads, sequence_parallel: bool) -> None:
    shared = tuple(f"{name}." for name, (kind, _) in found.items() if kind in ("attention", "shared"))
    done: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        kind, axis = found.get(name, ("", ""))
        if kind not in ("column", "row", "logits", "vocabulary", "head_bias"):
            continue
        if id(module) not in done:
            if kind in ("column", "row", "logits"):
                new = _linear(
                    module, kind, axis, name.startswith(shared) if shared else False, heads, sequence_parallel
                )
            else:
                new = _embedding(module, kind)
            for own, weight in new.named_parameters(recurse=False):
                weight.requires_grad_(getattr(module, own).requires_grad)
            done[id(module)] = new.train(module.training)
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, done[id(module)])


def _linear(module: Any, kind: str, axis: str, shared: bool, heads: Heads, sequence_parallel: bool) -> nn.Module:
    inputs, outputs = _linear_sizes(module)
    common = {"bias": module.bias is not None, "dtype": module.weight.dtype, "device": META}
    if kind == "logits":
        return ColumnParallelLinear(inputs, outputs, gather_output=True, output_plan=AxisPlan.padded(outputs), **common)
    # Attention needs the pieces of the sequence in order. Other layers treat every position alike, in any order, and
    # some models give them no batch dimension.
    common["sequence_dimension"] = SEQUENCE_DIM if axis in HEAD_AXES else 0
    if kind == "row":
        return (RowParallelConv1D if is_conv1d(module) else RowParallelLinear)(
            inputs,
            outputs,
            input_is_parallel=True,
            sequence_parallel_enabled=sequence_parallel,
            input_plan=heads.axis(axis, inputs),
            **common,
        )
    return (ColumnParallelConv1D if is_conv1d(module) else ColumnParallelLinear)(
        inputs,
        outputs,
        gather_output=False,
        sequence_parallel_enabled=sequence_parallel and not shared,
        input_is_shared=shared,
        output_plan=heads.axis(axis, outputs),
        **common,
    )


def _linear_sizes(module: Any) -> tuple[int, int]:
    """Return the inputs and outputs of a linear layer. Raises ParallelConfigError if it is none."""
    if is_conv1d(module):
        return module.weight.shape[0], module.weight.shape[1]
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    raise ParallelConfigError(f"the plan splits {type(module).__name__}, which is not a linear layer")


def _embedding(module: Any, kind: str) -> ParallelEmbedding:
    scale: Any = getattr(module, "embed_scale", None) if kind == "vocabulary" else None
    if not isinstance(module, nn.Embedding):
        raise ParallelConfigError(f"the plan splits {type(module).__name__}, which is not an embedding")
    new = (ParallelEmbedding if scale is None else ScaledParallelEmbedding)(
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
        shard_across_embedding=kind == "head_bias",
        collect_output=kind != "head_bias",
    )
    if scale is not None:
        new.register_buffer("embed_scale", scale, persistent=False)
    return new
