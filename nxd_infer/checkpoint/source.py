"""Logical weights from any source: tensors, safetensors, a training checkpoint, a model in training."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch import Tensor, nn

from nxd_infer.checkpoint.archive import RunsSource, opened_whole, require_no_adapter
from nxd_infer.checkpoint.folder import holds_checkpoint
from nxd_infer.checkpoint.gather import whole_weights
from nxd_infer.checkpoint.storage import storage_of
from nxd_infer.errors import CheckpointError
from nxd_infer.layout import WeightSource, as_source

Weights = WeightSource | Mapping[str, Tensor] | str | os.PathLike[str] | nn.Module


def weight_source(weights: Weights, tag: str | None = None) -> WeightSource:
    """Return the unsharded weights of ``weights``; weights in files are read slice by slice.

    Args:
        weights: tensors by name; a WeightSource; the path of safetensors (a file or a directory), or of a folder of
            ``save_checkpoint``, saved at any degrees; or the model itself, if this process holds all of it (degree 1;
            adapters are merged).
        tag: the checkpoint in the folder. Default: the newest complete one.

    Raises CheckpointError if there is no such checkpoint, it holds no weights of a module, or it is damaged.
    """
    if isinstance(weights, str | os.PathLike):
        return _stored(weights, tag)
    if tag is not None:
        raise CheckpointError(f"the tag {tag!r} names a checkpoint in a folder, and {type(weights).__name__} is none")
    if isinstance(weights, nn.Module):
        return whole_weights(weights)
    return as_source(weights)


def _stored(path: str | os.PathLike[str], tag: str | None) -> WeightSource:
    storage = storage_of(path)
    if tag is None and not holds_checkpoint(storage):
        return as_source(path)
    archive = opened_whole(storage, tag, ["model"])
    source = RunsSource(archive.pieces("model"))
    require_no_adapter(source, archive.where)
    return source
