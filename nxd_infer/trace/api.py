"""``parallel_model_trace`` and ``bucket_model_trace``: check the arguments, trace the ranks, compile, write, wrap.

Source: the API guide's chapter "Model Trace", and the autobucketing guide.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nxd_infer.artifact.manifest import BUCKET_KERNEL_NAME
from nxd_infer.runtime.load import load_artifact
from nxd_infer.runtime.model import (
    TensorParallelModel,
    TensorParallelNeuronModel,
    parallel_model_load,
    parallel_model_save,
)
from nxd_infer.trace.assemble import compare_ranks, compile_directories, graph_directories, write_artifact
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.plan import make_plan
from nxd_infer.trace.ranks.from_checkpoint import trace_ranks_here
from nxd_infer.trace.ranks.from_function import trace_ranks
from nxd_infer.trace.ranks.traced import WEIGHTS_FILE, rank_directory
from nxd_infer.trace.request import BucketModelConfig, TraceRequest, checked_request, make_workdir, save_kernel
from nxd_infer.util.options import accepts_options

if TYPE_CHECKING:
    from nxd_infer.trace.plan import TracePlan

__all__ = [
    "TensorParallelModel", "TensorParallelNeuronModel", "bucket_model_trace", "parallel_model_load",
    "parallel_model_save", "parallel_model_trace", "trace_plan",
]  # fmt: skip


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
    request = checked_request(options)
    make_workdir(options)
    beside = None
    if options.artifact_dir is not None:  # so that files can be linked
        beside = Path(options.artifact_dir).absolute().parent
        beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nxd-trace-", dir=beside, ignore_cleanup_errors=True) as name:
        build = Path(name)
        if request.bucket_config is not None:
            save_kernel(request.bucket_config, build / BUCKET_KERNEL_NAME)
        return _trace(request, build)


def _trace(request: TraceRequest, build: Path) -> TensorParallelModel:
    """Trace the ranks, compare and compile their graphs, write the artifact, wrap it."""
    options, backend, start = request.options, request.backend, time.monotonic()
    backend.prepare_trace(options.tp_degree, request.backend_options)
    if request.loader is not None:
        ranks = trace_ranks_here(request, build, request.loader)
    else:
        ranks = trace_ranks(request, build)
    compare_ranks(request, ranks, build)
    buckets = [bucket for rank in ranks for bucket in rank.buckets]
    report = compile_directories(graph_directories(ranks, build), buckets, backend, request.backend_options, options)
    if options.serialization_path is not None:
        folder = Path(options.serialization_path)
        folder.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            source = rank_directory(build, rank.rank) / WEIGHTS_FILE
            shutil.copyfile(source, folder / f"tp{rank.rank}_sharded_checkpoint.safetensors")
    given, temporary = options.artifact_dir, options.artifact_dir is None
    target = Path(tempfile.mkdtemp(prefix="nxd-artifact-") if given is None else given).absolute()
    try:
        write_artifact(target, request, ranks, build, report.pop("compiler"))
        artifact = load_artifact(target, verify=False, temporary=temporary, runs_here=not backend.cross_compiles)
        model = TensorParallelModel(artifact)
    except BaseException:
        if temporary:
            shutil.rmtree(target, ignore_errors=True)
        raise
    report |= {"ignored_compiler_args": request.ignored_arguments, "seconds": time.monotonic() - start}
    vars(model)["trace_report"] = report
    return model


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
    return make_plan(checked_request(options))
