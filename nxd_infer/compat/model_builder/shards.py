"""Unsharded checkpoints to those of ranks, by ``layout/``, after the hooks by which a model adapts its checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from nxd_infer.compat.model_builder.parallel_context import context_of
from nxd_infer.errors import ParallelConfigError
from nxd_infer.layout import check_weights, iter_shards, weight_layout
from nxd_infer.layout.files.stream import write_safetensors
from nxd_infer.layout.shard import stored_layout

Checkpoint = dict[str, Tensor]


def invoke_preshard_hook(module: nn.Module, checkpoint: Checkpoint, prefix: str = "") -> None:
    """Let the modules that define ``preshard_hook(checkpoint, name)`` change the unsharded ``checkpoint`` in place.

    ``name`` is what the module's own ``weight`` would be called. A module with a hook answers for those inside it.
    """
    hook = getattr(module, "preshard_hook", None)
    if callable(hook):
        hook(checkpoint, f"{prefix}weight")
        return
    for name, child in module.named_children():
        invoke_preshard_hook(child, checkpoint, f"{prefix}{name}.")


def adapted(model: nn.Module, checkpoint: Mapping[str, Tensor]) -> Checkpoint:
    """Return what the hooks of ``model`` make of ``checkpoint``, which stays as it is."""
    copied = dict(checkpoint)
    invoke_preshard_hook(model, copied)
    return copied


def rank_shard(model: nn.Module, checkpoint: Checkpoint, rank: int, degree: int) -> Checkpoint:
    """Return the weights of ``rank`` of ``degree``, by the model's names, in the dtypes of the adapted ``checkpoint``.

    Those that it lacks, such as caches, are left out. Raises WeightMismatchError for another shape.
    """
    layouts, stored = weight_layout(model), set(checkpoint)
    there = {n: one for n, one in layouts.items() if stored_layout(one.alias_of or n, layouts, stored) is not None}
    check_weights(there, checkpoint, strict=False)
    return dict(iter_shards(there, checkpoint, rank, degree))


def get_sharded_checkpoint(checkpoint: Checkpoint, model: nn.Module, rank: int, tp_degree: int) -> Checkpoint:
    """Replace the model's weights in ``checkpoint`` by those of ``rank``, after the model's hooks; return it.

    Other entries stay. Raises WeightMismatchError for a weight of another shape.
    """
    invoke_preshard_hook(model, checkpoint)
    shard = rank_shard(model, checkpoint, rank, tp_degree)
    for name in {name for layout in weight_layout(model).values() for name in layout.logical_names}:
        checkpoint.pop(name, None)
    checkpoint.update(shard)
    return checkpoint


def shard_checkpoint(
    checkpoint: Mapping[str, Tensor],
    model: nn.Module,
    start_rank: int | None = None,
    end_rank: int | None = None,
    load_on_device: bool = False,
    serialize_path: str | os.PathLike[str] | None = None,
) -> list[Checkpoint]:
    """Return the shards of ranks ``start_rank`` to ``end_rank`` (included; default: all) of an unsharded checkpoint.

    ``model`` was built for its degree, as any rank; its hooks change a copy of ``checkpoint``. ``serialize_path`` is a
    folder for ``tp{r}_sharded_checkpoint.safetensors``. ``load_on_device``: no effect, ranks place their weights.

    Raises WeightMismatchError for a weight of another shape, ParallelConfigError for ranks that do not exist.
    """
    degree = context_of(model).tp.degree
    first, last = start_rank or 0, degree - 1 if end_rank is None else end_rank
    if not 0 <= first <= last < degree:
        raise ParallelConfigError(f"start_rank={start_rank}, end_rank={end_rank}: the ranks are 0 to {degree - 1}")
    whole = adapted(model, checkpoint)
    shards = [rank_shard(model, whole, rank, degree) for rank in range(first, last + 1)]
    if serialize_path is not None:
        Path(serialize_path).mkdir(parents=True, exist_ok=True)
        for rank, shard in enumerate(shards, first):
            with open(Path(serialize_path) / f"tp{rank}_sharded_checkpoint.safetensors", "wb") as file:
                write_safetensors(file, [(n, t.dtype, t.shape) for n, t in shard.items()], shard.__getitem__)
    return shards
