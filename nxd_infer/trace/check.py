"""Whether the options of a trace fit together, and what follows from them, before anything runs."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nxd_infer.artifact.manifest import MANIFEST_NAME
from nxd_infer.artifact.names import BUCKET_KERNEL_NAME
from nxd_infer.artifact.writer import ArtifactWriter, checked_name
from nxd_infer.backends import registry
from nxd_infer.backends.base import Backend
from nxd_infer.backends.compiler_args import arguments_of
from nxd_infer.backends.quantization import check_quantize
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import (
    ArtifactBackendError,
    ArtifactError,
    BackendUnavailableError,
    ParallelConfigError,
    TraceConfigError,
)
from nxd_infer.runtime.supervisor.cores import check_degree
from nxd_infer.trace.buckets import BucketModelConfig, list_buckets
from nxd_infer.trace.options import TraceOptions
from nxd_infer.trace.request import TraceRequest


@dataclass
class CheckedTrace:
    """Options that fit together, and what follows from them."""

    options: TraceOptions
    request: TraceRequest
    backend: Backend
    ignored_arguments: list[str]
    """Those of ``compiler_args`` that mean nothing to the backend."""
    bucket_config: BucketModelConfig | None
    loader: Callable[[], Any] | None
    workdir: Path | None
    artifact_dir: Path | None
    serialization_path: Path | None
    metadata: dict[str, Any]
    extra_files: dict[str, Path]


def check_options(options: TraceOptions) -> CheckedTrace:
    """Report every contradiction before anything runs. Raises TraceConfigError."""
    if "NXD_SKIP_RENDEZVOUS" in os.environ:
        raise TraceConfigError("NXD_SKIP_RENDEZVOUS is set by parallel_model_trace in its ranks; unset it")
    _check_func(options.func)
    try:
        check_degree(options.tp_degree * options.pp_degree)
    except ParallelConfigError as error:
        name = "tp_degree" if options.pp_degree == 1 else "tp_degree x pp_degree"
        raise TraceConfigError(f"{name}: {error}") from None
    config = _bucket_config(options)
    loader = _loader(options)
    if options.serialization_path is not None and not options.spmd_mode:
        raise TraceConfigError("serialization_path needs spmd_mode=True")
    backend = tracing_backend(options.backend)
    _check_pipeline(options, backend)
    own, ignored = arguments_of(options.compiler_args, backend, options.target)
    check_quantize(backend, options.quantize)
    request = TraceRequest(
        func=options.func,
        buckets=list_buckets(options.example_inputs, config, options.func_kwargs),
        tp_degree=options.tp_degree,
        backend=options.backend,
        options=backend.options(own, options.quantize),
        states=list(options.states or ()),
        shared_states=config.shared_state_buffer if config is not None else None,
        state_preprocessor=config.shared_state_buffer_preprocessor if config is not None else None,
        pp_degree=options.pp_degree,
        pipeline_cuts=None if options.pipeline_cuts is None else list(options.pipeline_cuts),
    )
    files = _extra_files(options.extra_files or {})
    try:
        json.dumps(dict(options.metadata or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceConfigError(f"metadata is stored as JSON and cannot be: {error}") from error
    if options.artifact_dir is not None:
        ArtifactWriter(options.artifact_dir).check_target()
    return CheckedTrace(
        options=options,
        request=request,
        backend=backend,
        ignored_arguments=ignored,
        bucket_config=config,
        loader=loader,
        workdir=Path(options.compiler_workdir) if options.compiler_workdir is not None else None,
        artifact_dir=Path(options.artifact_dir).absolute() if options.artifact_dir is not None else None,
        serialization_path=Path(options.serialization_path) if options.serialization_path is not None else None,
        metadata=dict(options.metadata or {}),
        extra_files=files,
    )


def _check_func(func: Any) -> None:
    if isinstance(func, torch.nn.Module):
        raise TraceConfigError(
            f"func must be a function that builds the model in each rank, got a {type(func).__name__} that is built "
            "already: pass a function of a module that returns (model, {})"
        )
    if not callable(func):
        raise TraceConfigError(f"func must be a callable that returns the model, got {type(func).__name__}")


def _bucket_config(options: TraceOptions) -> BucketModelConfig | None:
    config = options.bucket_config
    if isinstance(config, Mapping):
        config = _from_mapping(config)
    if type(config).__name__ == BucketModelConfig.__name__ and not isinstance(config, BucketModelConfig):
        config = _from_mapping({name: getattr(config, name, None) for name in _DOCUMENTED})  # torch_neuronx's own
    if config is not None and not isinstance(config, BucketModelConfig):
        raise TraceConfigError(
            f"bucket_config must be a BucketModelConfig or a mapping of its arguments, got {type(config).__name__}"
        )
    if config is not None and options.inline_weights_to_neff:
        raise TraceConfigError(
            "bucket_config needs inline_weights_to_neff=False: the buckets share one copy of the weights; "
            "pass inline_weights_to_neff=False"
        )
    return config


def _loader(options: TraceOptions) -> Callable[[], Any] | None:
    """What returns the unsharded weights, if they are given in one way or the other."""
    loader = options.checkpoint_loader_callable
    if options.spmd_mode and options.inline_weights_to_neff:
        raise TraceConfigError("spmd_mode=True needs inline_weights_to_neff=False; pass inline_weights_to_neff=False")
    if options.checkpoint is None and options.checkpoint_tag is not None:
        raise TraceConfigError(f"checkpoint_tag={options.checkpoint_tag!r} needs checkpoint, the folder that holds it")
    if options.checkpoint is not None:
        if loader is not None:
            raise TraceConfigError("checkpoint and checkpoint_loader_callable are two sources of weights; give one")
        loader = functools.partial(weight_source, options.checkpoint, options.checkpoint_tag)
    if options.spmd_mode and loader is None:
        raise TraceConfigError(
            "spmd_mode=True needs checkpoint_loader_callable, a function that returns the unsharded weights, or "
            "checkpoint"
        )
    if loader is not None and not callable(loader):
        raise TraceConfigError(f"checkpoint_loader_callable must be callable, got {type(loader).__name__}")
    return loader


def _check_pipeline(options: TraceOptions, backend: Backend) -> None:
    stages, cuts = options.pp_degree, options.pipeline_cuts
    if cuts is not None and len(cuts) != stages - 1:
        raise TraceConfigError(
            f"pipeline_cuts names the last module of every stage but the last: pp_degree={stages} takes {stages - 1}, "
            f"got {len(cuts)}"
        )
    require_stages(backend, stages)
    if stages > 1 and options.serialization_path is not None:
        raise TraceConfigError(
            f"serialization_path writes one file per tensor parallel rank, and pp_degree={stages} gives each stage its "
            "own weights: leave one of the two out"
        )


def require_stages(backend: Backend, stages: int) -> None:
    """Raise TraceConfigError if the backend has no pipeline stages and ``stages`` are wanted."""
    if stages > 1 and backend.one_process:
        raise TraceConfigError(
            f"pp_degree={stages}: the {backend.name} backend runs all ranks in one process, without pipeline stages: "
            "trace with pp_degree=1 and a higher tp_degree, or for another backend"
        )


def _extra_files(given: Mapping[str, str | os.PathLike[str]]) -> dict[str, Path]:
    files = {str(name): Path(path) for name, path in given.items()}
    absent = [str(path) for path in files.values() if not path.is_file()]
    if absent:
        raise TraceConfigError(f"extra_files: there is no file {absent[0]}")
    for name in files:
        _check_extra_name(name)
    return files


def _check_extra_name(name: str) -> None:
    """``name`` is one inside the artifact that the artifact does not use itself."""
    try:
        checked_name(name)
    except ArtifactError as error:
        raise TraceConfigError(f"extra_files: {error}") from None
    first = name.split("/")[0]
    if first in (MANIFEST_NAME, BUCKET_KERNEL_NAME) or (first != name and first in ("graphs", "ops", "weights")):
        raise TraceConfigError(f"extra_files: {name!r} is a name of the artifact's own; choose another")


_DOCUMENTED = ("bucket_kernel", "shared_state_buffer", "shared_state_buffer_preprocessor", "func_kwargs")


def _from_mapping(arguments: Mapping[str, Any]) -> BucketModelConfig:
    try:
        return BucketModelConfig(**arguments)
    except TypeError as error:
        raise TraceConfigError(f"bucket_config is not a mapping of BucketModelConfig's arguments: {error}") from None


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
