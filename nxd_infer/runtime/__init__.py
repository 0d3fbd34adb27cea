"""Run an artifact: TensorParallelModel and RankModel, their rank processes, weight updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

_NAMES = {
    "RankModel": ".rank_model",
    "TensorParallelModel": ".model",
    "load_artifact": ".load",
    "parallel_model_load": ".save_load",
    "parallel_model_save": ".save_load",
}

__all__ = ["RankModel", "TensorParallelModel", "load_artifact", "parallel_model_load", "parallel_model_save"]

if TYPE_CHECKING:
    from nxd_infer.runtime.load import load_artifact
    from nxd_infer.runtime.model import TensorParallelModel
    from nxd_infer.runtime.rank_model import RankModel
    from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
