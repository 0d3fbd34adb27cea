"""``parallel_model_trace`` and ``bucket_model_trace``: check the arguments, trace the ranks, compile, write, wrap.

Source: the API guide's chapter "Model Trace", and the autobucketing guide.
"""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nxd_infer.backends import registry
from nxd_infer.backends.compile.pool import make_workdir
from nxd_infer.checkpoint.source import Weights
from nxd_infer.runtime.model import TensorParallelModel, TensorParallelNeuronModel
from nxd_infer.runtime.save_load import parallel_model_load, parallel_model_save
from nxd_infer.trace.buckets import BucketModelConfig, save_kernel
from nxd_infer.trace.check import check_arguments, temporary_root
from nxd_infer.trace.progress import Progress, silent
from nxd_infer.trace.steps import make_plan, run

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


def parallel_model_trace(
    func: Callable[..., Any],
    example_inputs: Any,
    compiler_workdir: str | os.PathLike[str] | None = None,
    compiler_args: Any = None,
    inline_weights_to_neff: bool = True,
    bucket_config: BucketModelConfig | Mapping[str, Any] | None = None,
    tp_degree: int = 1,
    max_parallel_compilations: int | None = None,
    *,
    states: Sequence[str | Tensor] | None = None,
    spmd_mode: bool = False,
    checkpoint_loader_callable: Callable[[], Any] | None = None,
    force_custom_init_on_device: bool = False,
    serialization_path: str | os.PathLike[str] | None = None,
    backend: str = registry.DEFAULT,
    func_kwargs: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra_files: Mapping[str, str | os.PathLike[str]] | None = None,
    artifact_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    trace_timeout: float = 7200.0,
    checkpoint: Weights | None = None,
    checkpoint_tag: str | None = None,
    quantize: str | None = None,
) -> TensorParallelModel:
    """Trace a model for ``tp_degree`` ranks and return it ready to call.

    Args:
        func: returns ``(model, aliases)`` (or the model alone) for the rank that calls it; ``aliases`` maps a buffer or
            parameter of the model to the number of the output that is its next value. It stays with the rank and the
            output is not returned. Runs in a spawned process a rank, so it must be importable by name.
        example_inputs: a tensor, a tuple or list of tensors, or a dictionary of them by name; with a ``bucket_config``
            a list of such entries, one a bucket.
        compiler_workdir: where everything that compilers wrote is put, in a directory of its own; made where it is not
            there. Default: it is removed. Graphs that the compile cache holds are not compiled again, and leave nothing
            there (``NXD_INFER_CACHE_LIMIT=0`` turns the cache off).
        compiler_args: options of the backend (the documents list each one's), as a dictionary, a list or text of
            ``key=value`` or ``--key=value``. Arguments of the Neuron compiler in its own words
            (``"--model-type=transformer -O1"``, or a list of such) mean nothing to the others: they are ignored, and
            ``trace_report["ignored_compiler_args"]`` names them.
        inline_weights_to_neff: True makes the weights part of the model for good: ``update_weights`` is refused. They
            are stored once, beside the graphs, in both cases.
        bucket_config: several shapes in one model, or a mapping of BucketModelConfig's arguments. Needs
            ``inline_weights_to_neff=False``.
        tp_degree: number of ranks.
        max_parallel_compilations: at most this many ranks hold weights at a time, and at most this many graphs compile
            at a time. Below ``tp_degree``, ``func`` must not communicate. Default: all ranks at once.
        states: further buffers (qualified names) that the model changes in place. Those it is seen to change are found.
        spmd_mode: every rank must trace to the same graphs. Needs ``checkpoint_loader_callable`` and
            ``inline_weights_to_neff=False``.
        checkpoint_loader_callable: returns the unsharded weights, as ``checkpoint`` takes them. ``func`` then runs in
            this process and its parameters are never materialised; each rank's are cut from these.
        force_custom_init_on_device: accepted; parameters that a loader fills are never initialised here.
        serialization_path: with ``spmd_mode``, also write ``tp{r}_sharded_checkpoint.safetensors`` there.
        backend: who compiles and runs the graphs, by name; ``nxd-infer doctor`` lists them.
        func_kwargs: keyword arguments of ``func`` for every bucket.
        metadata: what a server needs to know; stored in the artifact.
        extra_files: ``{name in the artifact: file}``.
        artifact_dir: write the artifact here for good, instead of into a temporary directory that
            ``parallel_model_save`` links from.
        progress: called as ``progress(stage, done, total, note)``.
        trace_timeout: seconds that tracing all ranks, and compiling each graph, may take.
        checkpoint: the unsharded weights themselves, in place of a loader: the folder that ``save_checkpoint`` wrote
            into at any degree, the path of safetensors, a dictionary, a WeightSource, or a trained model of degree 1.
        checkpoint_tag: which checkpoint of the folder. Default: the newest complete one.
        quantize: ``"int8"`` holds the weights of linear layers (and a table that is tied to one) in eight bits with a
            scale for each output: a decode step reads half the bytes. Weight files keep the traced type; ranks
            quantise as they load, and again when weights are updated. Small weights stay as they are (``nxd_packed``).

    Returns:
        TensorParallelModel; its ``trace_report`` says how many graphs there are and how many were compiled now.

    Raises:
        TraceConfigError: arguments that contradict each other.
        TraceError: tracing or compiling failed; with the rank and its traceback.
    """
    arguments = dict(locals())

    settings = check_arguments(**arguments)
    make_workdir(settings.workdir)
    build = Path(tempfile.mkdtemp(prefix=".nxd-trace-", dir=temporary_root(settings)))
    try:
        kernel = None
        if settings.config is not None and settings.config.bucket_kernel is not None:
            kernel = build / "bucket_kernel.pt"
            save_kernel(settings.config, kernel)
        return run(settings, build, kernel, progress or silent)
    finally:
        shutil.rmtree(build, ignore_errors=True)


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


def trace_plan(*arguments: Any, **named: Any) -> TracePlan:
    """What :func:`parallel_model_trace` would do with the same arguments; runs and compiles nothing.

    With a ``checkpoint_loader_callable``, ``func`` is called once (without parameters in memory) to count bytes.
    Raises TraceConfigError as the trace would.
    """
    bound = inspect.signature(parallel_model_trace).bind(*arguments, **named)
    bound.apply_defaults()
    return make_plan(check_arguments(**bound.arguments))
