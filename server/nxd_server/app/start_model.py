"""Create the model that a server runs, without torch if possible."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nxd_infer.runtime.rank_model import RankModel, takes_arrays

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact


def make_model(artifact: LoadedArtifact, spawned: threading.Event, **options: Any) -> RankModel:
    """Return the model of ``artifact``, whose files are not hashed yet; sets ``spawned`` when a process imports torch.

    The engine for generation makes no tensors, so its server does not import torch, and hashes while the ranks do.
    """

    def before_load() -> None:
        spawned.set()
        artifact.verify()

    if artifact.manifest.metadata.get("task") == "generate" and takes_arrays(artifact.manifest):
        return RankModel(artifact, before_load=before_load, **options)
    before_load()
    from nxd_infer.runtime.model import TensorParallelModel  # slow: torch

    return TensorParallelModel(artifact, in_process=False, **options)
