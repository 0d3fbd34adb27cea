"""``parallel_model_trace`` and ``bucket_model_trace``: check the arguments, trace the ranks, compile, write, wrap.

Source: the API guide's chapter "Model Trace", and the autobucketing guide.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.backends.compile.pool import make_workdir
from nxd_infer.runtime.model import TensorParallelModel, TensorParallelNeuronModel
from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save
from nxd_infer.trace.buckets import BucketModelConfig, save_kernel
from nxd_infer.trace.check import check_options
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.run import make_plan, run
from nxd_infer.util.options import accepts_options
from nxd_infer.util.progress import silent
from nxd_infer.util.temporary import temporary_name

if TYPE_CHECKING:
    from nxd_infer.trace.plan import TracePlan

__all__ = [
    "TensorParallelModel",
    "TensorParallelNeuronModel",
    "bucket_model_trace",
    "parallel_model_load",
    "parallel_model_save",
    "parallel_model_trace",
    "trace_plan",
]


@accepts_options(TraceOptions)
def parallel_model_trace(options: TraceOptions) -> TensorParallelModel:
    """Trace a model for ``tp_degree`` ranks and return it ready to call.

    Args:
        {arguments}

    Returns:
        TensorParallelModel; its ``trace_report`` gives the number of graphs and how many were compiled now.

    Raises:
        TraceConfigError: arguments that contradict each other.
        TraceError: tracing or compiling failed; includes the rank and its traceback.
    """
    checked = check_options(options)
    make_workdir(checked.workdir)
    build = temporary_name(".nxd-trace-", _temporary_root(checked.artifact_dir))
    try:
        build.mkdir(mode=0o700)
        kernel = None
        if checked.bucket_config is not None and checked.bucket_config.bucket_kernel is not None:
            kernel = build / "bucket_kernel.pt"
            save_kernel(checked.bucket_config, kernel)
        return run(checked, build, kernel, options.progress or silent)
    finally:
        shutil.rmtree(build, ignore_errors=True)


def _temporary_root(artifact_dir: Path | None) -> Path | None:
    """Beside the artifact where that is given, so that files can be linked; else the system's choice."""
    if artifact_dir is None:
        return None
    artifact_dir.parent.mkdir(parents=True, exist_ok=True)
    return artifact_dir.parent


def bucket_model_trace(
    func: Callable[..., Any],
    example_inputs: Sequence[Any],
    bucket_config: BucketModelConfig | Mapping[str, Any],
    compiler_workdir: str | os.PathLike[str] | None = None,
    compiler_args: Any = None,
    **more: Any,
) -> TensorParallelModel:
    """Trace several shapes of a model for one device: :func:`parallel_model_trace` with ``tp_degree=1``."""
    return parallel_model_trace(func, example_inputs, compiler_workdir, compiler_args, False, bucket_config, 1, **more)


@accepts_options(TraceOptions)
def trace_plan(options: TraceOptions) -> TracePlan:
    """Return what :func:`parallel_model_trace` would do with the same arguments; run and compile nothing.

    With a ``checkpoint_loader_callable``, ``func`` is called once (without parameters in memory) to count bytes.
    Raises TraceConfigError like the trace.
    """
    return make_plan(check_options(options))
