"""Run an artifact: TensorParallelModel and RankModel, their rank processes, weight updates.

::

    model, rank_model           what users and the engine call
    ranks                       the ranks as these see them: interface, lock, steps that were begun
    router, bucket_kernel       which graph a call runs
    load, time_bounds           checks that an artifact runs here; how long its ranks may take
    supervisor/                 the caller's side of the ranks: start, call, watch and end them
    rank_process/               a rank's side: its weights, states and graphs, and the process that runs them
    ipc                         what both share: the memory of the tensors, and the records of their socket
    updates/                    new weights and adapters
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

__all__ = ["RankModel", "TensorParallelModel", "load_artifact", "parallel_model_load", "parallel_model_save"]

if TYPE_CHECKING:
    from nxd_infer.runtime.load import load_artifact
    from nxd_infer.runtime.model import TensorParallelModel, parallel_model_load, parallel_model_save
    from nxd_infer.runtime.rank_model import RankModel

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".load": "load_artifact",
        ".model": "TensorParallelModel parallel_model_load parallel_model_save",
        ".rank_model": "RankModel",
    },
)
