"""The model that a server starts: one without torch where that will do."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from nxd_infer.runtime.rank_model import RankModel, takes_arrays

if TYPE_CHECKING:
    from nxd_infer.artifact.reader import LoadedArtifact


def make_model(artifact: LoadedArtifact, spawned: threading.Event, **options: Any) -> RankModel:
    """The model of ``artifact``, whose files are not hashed yet; ``spawned`` is set when its ranks' processes run.

    The engine that generates makes no tensors: its server imports no torch, and hashes while the ranks do.
    """

    def before_load() -> None:
        spawned.set()
        artifact.verify()

    if artifact.manifest.metadata.get("task") == "generate" and takes_arrays(artifact.manifest):
        return RankModel(artifact, before_load=before_load, **options)
    before_load()
    from nxd_infer.runtime.model import TensorParallelModel  # slow: torch

    return TensorParallelModel(artifact, in_process=False, **options)
