"""``parallel_model_save`` and ``parallel_model_load``. Source: the API guide's chapter "Model Trace"."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nxd_infer.artifact.manifest import weight_name
from nxd_infer.artifact.rank_weights import replace_weights
from nxd_infer.artifact.writer import (
    ArtifactWriter,
)
from nxd_infer.errors import ArtifactError
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import TensorParallelModel


def parallel_model_save(model: TensorParallelModel, save_dir: str | os.PathLike[str], *, replace: bool = True) -> None:
    """Save a traced model as the artifact directory ``save_dir``, all or nothing.

    An existing artifact is replaced in one step; any other non-empty directory is rejected (ArtifactError). Weights
    that ``update_weights`` swapped in are saved. Files of a freshly traced model are hard-linked if the file system
    allows it, else copied and checked. Raises ArtifactSpaceError if the disk is full; then nothing half-written
    remains.
    """
    if not isinstance(model, TensorParallelModel):
        raise ArtifactError(
            f"parallel_model_save takes the model that parallel_model_trace or parallel_model_load returned, "
            f"got {type(model).__name__}"
        )
    source = model.artifact
    updated = model.updated_weights()
    if Path(os.path.abspath(save_dir)) == source.path and not any(updated):
        return  # it is already complete
    manifest = source.manifest.model_copy(deep=True)
    with ArtifactWriter(save_dir, replace=replace) as writer:
        for rank, tensors in enumerate(updated):
            if tensors:
                replace_weights(source.weight_file(rank), writer.file(weight_name(rank)), tensors)
        for name, spec in source.manifest.files.items():
            if not (writer.path / name).exists():
                writer.add(name, source.path / name, link=source.temporary, known=spec)
        writer.commit(manifest)


def parallel_model_load(
    load_dir: str | os.PathLike[str],
    *,
    call_timeout: float | None = None,
    start_timeout: float | None = None,
    backend: str | None = None,
    verify: bool = True,
    expect_digest: str | None = None,
    **options: Any,
) -> TensorParallelModel:
    """Load a saved model as a :class:`TensorParallelModel`; nothing is compiled and no model code is needed.

    The ranks start at the first call, or with ``model.start()``. ``options``: see TensorParallelModel; for errors see
    :func:`load_artifact`.
    """
    artifact = load_artifact(load_dir, verify=verify, expect_digest=expect_digest, backend=backend)
    return TensorParallelModel(artifact, call_timeout=call_timeout, start_timeout=start_timeout, **options)
