"""Trace a model ahead of time, save it, load it, call it. Names are resolved on first use; importing is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nxd_infer.util.lazy import lazy_names

__all__ = [  # noqa: RUF022  (documented names first)
    "parallel_model_trace", "parallel_model_save", "parallel_model_load", "parallel_model_recompile",
    "BucketModelConfig", "bucket_model_trace", "trace_plan", "TensorParallelModel", "TensorParallelNeuronModel",
    "load_artifact", "ArtifactWriter", "TracePlan", "Progress",
]  # fmt: skip

if TYPE_CHECKING:
    from nxd_infer.artifact.writer import ArtifactWriter
    from nxd_infer.runtime.load import load_artifact
    from nxd_infer.runtime.model import (
        TensorParallelModel,
        TensorParallelNeuronModel,
        parallel_model_load,
        parallel_model_save,
    )
    from nxd_infer.trace.api import bucket_model_trace, parallel_model_trace, trace_plan
    from nxd_infer.trace.plan import TracePlan
    from nxd_infer.trace.recompile import parallel_model_recompile
    from nxd_infer.trace.request import BucketModelConfig
    from nxd_infer.util.progress import Progress

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "nxd_infer.artifact.writer": "ArtifactWriter",
        "nxd_infer.runtime.load": "load_artifact",
        "nxd_infer.runtime.model": (
            "TensorParallelModel TensorParallelNeuronModel parallel_model_load parallel_model_save"
        ),
        "nxd_infer.util.progress": "Progress",
        ".api": "bucket_model_trace parallel_model_trace trace_plan",
        ".plan": "TracePlan",
        ".recompile": "parallel_model_recompile",
        ".request": "BucketModelConfig",
    },
)
