"""The arguments of ``parallel_model_trace``, checked: every contradiction is reported before anything runs."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.structure import BUCKET_KERNEL_NAME
from nxd_infer.artifact.writer import ArtifactWriter, checked_name
from nxd_infer.backends import registry
from nxd_infer.backends.base import Backend
from nxd_infer.backends.compiler_args import split_arguments
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import (
    ArtifactBackendError,
    ArtifactError,
    BackendUnavailableError,
    ParallelConfigError,
    TraceConfigError,
)
from nxd_infer.runtime.ranks.cores import check_degree
from nxd_infer.trace.buckets import BucketModelConfig, list_buckets
from nxd_infer.trace.request import TraceRequest


@dataclass
class TraceSettings:
    """The checked arguments that are not part of the request."""

    request: TraceRequest
    config: BucketModelConfig | None
    backend: Backend
    options: dict[str, Any]
    quantize: str | None
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


def temporary_root(settings: TraceSettings) -> str | None:
    """Beside the artifact where that is given, so that files can be linked; else the system's choice."""
    if settings.artifact_dir is None:
        return None
    settings.artifact_dir.parent.mkdir(parents=True, exist_ok=True)
    return str(settings.artifact_dir.parent)


def check_arguments(
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
) -> TraceSettings:
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
    if isinstance(bucket_config, Mapping):
        bucket_config = _from_mapping(bucket_config)
    if bucket_config is not None and not isinstance(bucket_config, BucketModelConfig):
        raise TraceConfigError(
            "bucket_config must be a BucketModelConfig or a mapping of its arguments, got "
            f"{type(bucket_config).__name__}"
        )
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
    options = found.options(own, quantize)
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
        options=options,
        states=list(states or ()),
        shared_states=bucket_config.shared_state_buffer if bucket_config is not None else None,
        state_preprocessor=bucket_config.shared_state_buffer_preprocessor if bucket_config is not None else None,
    )
    return TraceSettings(
        request=request,
        config=bucket_config,
        backend=found,
        options=options,
        quantize=quantize,
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


def _from_mapping(arguments: Mapping[str, Any]) -> BucketModelConfig:
    try:
        return BucketModelConfig(**arguments)
    except TypeError as error:
        raise TraceConfigError(f"bucket_config is no mapping of BucketModelConfig's arguments: {error}") from None


def tracing_backend(name: str) -> Backend:
    """The backend, if models can be traced for it here. Raises TraceConfigError, BackendUnavailableError."""
    try:
        found = registry.get(name)
    except ArtifactBackendError as error:
        raise TraceConfigError(str(error)) from None
    probe = found.probe_compiler()
    if not probe.ok:
        raise BackendUnavailableError(f"the backend {name!r} cannot trace here: {probe.reason}")
    return found
