"""``parallel_model_trace`` and ``bucket_model_trace``: check the arguments, trace the ranks, compile, write, wrap.

Source: the API guide's chapter "Model Trace", and the autobucketing guide.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nxd_infer import backends
from nxd_infer.backends.arguments import split_arguments
from nxd_infer.backends.compile_pool import make_workdir
from nxd_infer.backends.encoding import quantize_option
from nxd_infer.backends.lower import configuration
from nxd_infer.errors import (
    ArtifactBackendError,
    ArtifactError,
    BackendUnavailableError,
    ParallelConfigError,
    TraceConfigError,
)
from nxd_infer.trace.artifact import BUCKET_KERNEL_NAME, parallel_model_load, parallel_model_save
from nxd_infer.trace.buckets import BucketModelConfig, list_buckets, save_kernel
from nxd_infer.trace.cores import check_degree
from nxd_infer.trace.manifest import MANIFEST_NAME
from nxd_infer.trace.model import TensorParallelModel, TensorParallelNeuronModel
from nxd_infer.trace.progress import Progress, silent
from nxd_infer.trace.request import TraceRequest
from nxd_infer.trace.sources import Weights, weight_source
from nxd_infer.trace.storage import ArtifactWriter, checked_name

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


@dataclass
class _Settings:
    """The checked arguments that are not part of the request."""

    request: TraceRequest
    config: BucketModelConfig | None
    backend: backends.Backend
    options: dict[str, Any]
    ignored_arguments: list[str]
    loader: Callable[[], Any] | None
    one_program: bool
    inline_weights: bool
    max_parallel: int | None
    workdir: Path | None
    artifact_dir: Path | None
    serialization_path: Path | None
    metadata: dict[str, Any]
    extra_files: dict[str, Path]
    timeout: float


def parallel_model_trace(
    func: Callable[..., Any],
    example_inputs: Any,
    compiler_workdir: str | os.PathLike[str] | None = None,
    compiler_args: Any = None,
    inline_weights_to_neff: bool = True,
    bucket_config: BucketModelConfig | None = None,
    tp_degree: int = 1,
    max_parallel_compilations: int | None = None,
    *,
    states: Sequence[str | Tensor] | None = None,
    spmd_mode: bool = False,
    checkpoint_loader_callable: Callable[[], Any] | None = None,
    force_custom_init_on_device: bool = False,
    serialization_path: str | os.PathLike[str] | None = None,
    backend: str = "inductor",
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
        compiler_args: options of the backend (inductor: those of ``torch._inductor.config`` and ``cpu_target``), as a
            dictionary, a list or text of ``key=value`` or ``--key=value``. Arguments of the Neuron compiler in its own
            words (``"--model-type=transformer -O1"``, or a list of such) mean nothing on a CPU: they are ignored, and
            ``trace_report["ignored_compiler_args"]`` names them.
        inline_weights_to_neff: True makes the weights part of the model for good: ``update_weights`` is refused. They
            are stored once, beside the graphs, in both cases.
        bucket_config: several shapes in one model. Needs ``inline_weights_to_neff=False``.
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
        backend: ``"inductor"`` or ``"eager"``.
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
    from nxd_infer.trace.run import run

    settings = _check(**arguments)
    make_workdir(settings.workdir)
    build = Path(tempfile.mkdtemp(prefix=".nxd-trace-", dir=_temporary_root(settings)))
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
    bucket_config: BucketModelConfig,
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
    from nxd_infer.trace.run import make_plan

    bound = inspect.signature(parallel_model_trace).bind(*arguments, **named)
    bound.apply_defaults()
    return make_plan(_check(**bound.arguments))


def _temporary_root(settings: _Settings) -> str | None:
    """Beside the artifact where that is given, so that files can be linked; else the system's choice."""
    if settings.artifact_dir is None:
        return None
    settings.artifact_dir.parent.mkdir(parents=True, exist_ok=True)
    return str(settings.artifact_dir.parent)


def _check(
    func: Any,
    example_inputs: Any,
    compiler_workdir: Any,
    compiler_args: Any,
    inline_weights_to_neff: Any,
    bucket_config: Any,
    tp_degree: Any,
    max_parallel_compilations: Any,
    states: Any,
    spmd_mode: bool,
    checkpoint_loader_callable: Any,
    serialization_path: Any,
    backend: str,
    func_kwargs: Any,
    metadata: Any,
    extra_files: Any,
    artifact_dir: Any,
    trace_timeout: Any,
    checkpoint: Any,
    checkpoint_tag: Any,
    quantize: Any,
    **_: Any,
) -> _Settings:
    """Every contradiction is reported before anything runs."""
    if "NXD_SKIP_RENDEZVOUS" in os.environ:
        raise TraceConfigError("NXD_SKIP_RENDEZVOUS is set by parallel_model_trace in its ranks; unset it")
    if isinstance(func, torch.nn.Module):
        raise TraceConfigError(
            f"func must be a function that builds the model in each rank, got a {type(func).__name__} that is built "
            "already: pass a function of a module that returns (model, {})"
        )
    if not callable(func):
        raise TraceConfigError(f"func must be a callable that returns the model, got {type(func).__name__}")
    for name, value in (("tp_degree", tp_degree), ("max_parallel_compilations", max_parallel_compilations)):
        if (value is not None or name == "tp_degree") and (
            not isinstance(value, int) or isinstance(value, bool) or value < 1
        ):
            raise TraceConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
    try:
        check_degree(tp_degree)
    except ParallelConfigError as error:
        raise TraceConfigError(f"tp_degree: {error}") from None
    if bucket_config is not None and not isinstance(bucket_config, BucketModelConfig):
        if not hasattr(bucket_config, "bucket_kernel"):
            raise TraceConfigError(f"bucket_config must be a BucketModelConfig, got {type(bucket_config).__name__}")
        bucket_config = _adopt(bucket_config)
    if bucket_config is not None and inline_weights_to_neff:
        raise TraceConfigError(
            "bucket_config needs inline_weights_to_neff=False: the buckets share one copy of the weights; "
            "pass inline_weights_to_neff=False"
        )
    if spmd_mode and inline_weights_to_neff:
        raise TraceConfigError("spmd_mode=True needs inline_weights_to_neff=False; pass inline_weights_to_neff=False")
    if checkpoint is None and checkpoint_tag is not None:
        raise TraceConfigError(f"checkpoint_tag={checkpoint_tag!r} needs checkpoint, the folder that holds it")
    if checkpoint is not None:
        if checkpoint_loader_callable is not None:
            raise TraceConfigError("checkpoint and checkpoint_loader_callable are two sources of weights; give one")
        checkpoint_loader_callable = functools.partial(weight_source, checkpoint, checkpoint_tag)
    if spmd_mode and checkpoint_loader_callable is None:
        raise TraceConfigError(
            "spmd_mode=True needs checkpoint_loader_callable, a function that returns the unsharded weights, or "
            "checkpoint"
        )
    if checkpoint_loader_callable is not None and not callable(checkpoint_loader_callable):
        raise TraceConfigError(
            f"checkpoint_loader_callable must be callable, got {type(checkpoint_loader_callable).__name__}"
        )
    if serialization_path is not None and not spmd_mode:
        raise TraceConfigError("serialization_path needs spmd_mode=True")
    if not isinstance(trace_timeout, (int, float)) or not 0 < trace_timeout < math.inf:
        raise TraceConfigError(f"trace_timeout is a positive number of seconds, got {trace_timeout!r}")
    found = tracing_backend(backend)
    own, ignored = split_arguments(compiler_args, found.has_option)
    options = found.options(own)
    buckets = list_buckets(example_inputs, bucket_config, func_kwargs)
    files = {str(name): Path(path) for name, path in (extra_files or {}).items()}
    absent = [str(path) for path in files.values() if not path.is_file()]
    if absent:
        raise TraceConfigError(f"extra_files: there is no file {absent[0]}")
    for name in files:
        _check_extra_name(name)
    try:
        json.dumps(dict(metadata or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceConfigError(f"metadata is stored as JSON and cannot be: {error}") from error
    if artifact_dir is not None:
        ArtifactWriter(artifact_dir).check_target()
    request = TraceRequest(
        func=func,
        buckets=buckets,
        tp_degree=tp_degree,
        backend=backend,
        configuration={**configuration(backend, options), **quantize_option(quantize, options)},
        states=list(states or ()),
        shared_states=bucket_config.shared_state_buffer if bucket_config is not None else None,
        state_preprocessor=bucket_config.shared_state_buffer_preprocessor if bucket_config is not None else None,
    )
    return _Settings(
        request=request,
        config=bucket_config,
        backend=found,
        options=options,
        ignored_arguments=ignored,
        loader=checkpoint_loader_callable,
        one_program=spmd_mode,
        inline_weights=bool(inline_weights_to_neff),
        max_parallel=max_parallel_compilations,
        workdir=Path(compiler_workdir) if compiler_workdir is not None else None,
        artifact_dir=Path(artifact_dir).absolute() if artifact_dir is not None else None,
        serialization_path=Path(serialization_path) if serialization_path is not None else None,
        metadata=dict(metadata or {}),
        extra_files=files,
        timeout=float(trace_timeout),
    )


def _check_extra_name(name: str) -> None:
    """``name`` is one inside the artifact that the artifact does not use itself."""
    try:
        checked_name(name)
    except ArtifactError as error:
        raise TraceConfigError(f"extra_files: {error}") from None
    first = name.split("/")[0]
    if first in (MANIFEST_NAME, BUCKET_KERNEL_NAME) or (first != name and first in ("graphs", "ops", "weights")):
        raise TraceConfigError(f"extra_files: {name!r} is a name of the artifact's own; choose another")


def _adopt(config: Any) -> BucketModelConfig:
    """A configuration object of another package with the attributes of BucketModelConfig."""
    return BucketModelConfig(
        config.bucket_kernel,
        shared_state_buffer=getattr(config, "shared_state_buffer", None),
        shared_state_buffer_preprocessor=getattr(config, "shared_state_buffer_preprocessor", None),
        func_kwargs=getattr(config, "func_kwargs", None),
        bucket_kernel_constant_args=getattr(config, "bucket_kernel_constant_args", None),
        names=getattr(config, "names", None),
        metadata=getattr(config, "metadata", None),
    )


def tracing_backend(name: str) -> backends.Backend:
    """The backend, if models can be traced for it here. Raises TraceConfigError, BackendUnavailableError."""
    try:
        found = backends.get(name)
    except ArtifactBackendError as error:
        raise TraceConfigError(str(error)) from None
    probe = found.probe_compiler()
    if not probe.ok:
        raise BackendUnavailableError(f"the backend {name!r} cannot trace here: {probe.reason}")
    return found
