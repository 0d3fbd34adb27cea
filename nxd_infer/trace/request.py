"""The request of a trace: its options, checked against each other before anything runs, and what follows from them."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nxd_infer.artifact.manifest import BUCKET_KERNEL_NAME, MANIFEST_NAME
from nxd_infer.artifact.writer import ArtifactWriter, checked_name
from nxd_infer.backends import registry
from nxd_infer.backends.base import Backend, check_quantize
from nxd_infer.backends.compiler_args import arguments_of
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import (
    ArtifactBackendError,
    ArtifactError,
    BackendUnavailableError,
    ParallelConfigError,
    TraceConfigError,
)
from nxd_infer.trace.buckets import Bucket, BucketModelConfig, list_buckets
from nxd_infer.trace.options import RecompileOptions, TraceOptions
from nxd_infer.util.machine import check_degree


@dataclass
class TraceRequest:
    """Options that fit together, and what follows from them."""

    options: TraceOptions
    buckets: list[Bucket]
    bucket_config: BucketModelConfig | None
    backend_options: dict[str, Any]
    """Options of the backend, checked and completed."""
    ignored_arguments: list[str]
    """Those of ``compiler_args`` that mean nothing to the backend."""
    loader: Callable[[], Any] | None
    """Returns the unsharded weights; None: ``func`` builds the model with its weights."""

    @property
    def backend(self) -> Backend:
        return registry.get(self.options.backend)

    def for_ranks(self) -> TraceRequest:
        """Return what rank processes need of it; the rest may not be picklable."""
        given, config = self.options, self.bucket_config
        options = TraceOptions(
            given.func,
            None,
            tp_degree=given.tp_degree,
            pp_degree=given.pp_degree,
            pipeline_cuts=given.pipeline_cuts,
            batch_dim=given.batch_dim,
            states=given.states,
            backend=given.backend,
        )
        if config is not None:
            config = BucketModelConfig(
                shared_state_buffer=config.shared_state_buffer,
                shared_state_buffer_preprocessor=config.shared_state_buffer_preprocessor,
            )
        return replace(self, options=options, bucket_config=config, loader=None)


def checked_request(options: TraceOptions) -> TraceRequest:
    """Report every contradiction before anything runs. Raises TraceConfigError."""
    if "NXD_SKIP_RENDEZVOUS" in os.environ:
        raise TraceConfigError("NXD_SKIP_RENDEZVOUS is set by parallel_model_trace in its ranks; unset it")
    if isinstance(options.func, torch.nn.Module):
        raise TraceConfigError(
            f"func must be a function that builds the model in each rank, got a {type(options.func).__name__} that is "
            "built already: pass a function of a module that returns (model, {})"
        )
    if not callable(options.func):
        raise TraceConfigError(f"func must be a callable that returns the model, got {type(options.func).__name__}")
    try:
        check_degree(options.tp_degree * options.pp_degree)
    except ParallelConfigError as error:
        name = "tp_degree" if options.pp_degree == 1 else "tp_degree x pp_degree"
        raise TraceConfigError(f"{name}: {error}") from None
    config = _bucket_config(options)
    if options.batch_dim is not None and config is not None and config.bucket_kernel is not None:
        raise TraceConfigError(
            f"batch_dim={options.batch_dim} says what is padded, and a bucket_kernel pads itself: leave one of the two "
            "out"
        )
    loader = _loader(options)
    if options.serialization_path is not None and not options.spmd_mode:
        raise TraceConfigError("serialization_path needs spmd_mode=True")
    backend = tracing_backend(options.backend)
    _check_pipeline(options, backend)
    backend_options, ignored = options_of(backend, options.compiler_args, options.target, options.quantize)
    for name, source in (options.extra_files or {}).items():
        _check_extra_file(str(name), source)
    try:
        json.dumps(dict(options.metadata or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceConfigError(f"metadata is stored as JSON and cannot be: {error}") from error
    if options.artifact_dir is not None:
        ArtifactWriter(options.artifact_dir).check_target()
    buckets = list_buckets(options.example_inputs, config, options.func_kwargs)
    return TraceRequest(options, buckets, config, backend_options, ignored, loader)


_DOCUMENTED = ("bucket_kernel", "shared_state_buffer", "shared_state_buffer_preprocessor", "func_kwargs")


def _bucket_config(options: TraceOptions) -> BucketModelConfig | None:
    config = options.bucket_config
    if type(config).__name__ == BucketModelConfig.__name__ and not isinstance(config, BucketModelConfig):
        config = {name: getattr(config, name, None) for name in _DOCUMENTED}  # torch_neuronx's own
    if isinstance(config, Mapping):
        try:
            config = BucketModelConfig(**config)
        except TypeError as error:
            raise TraceConfigError(
                f"bucket_config is not a mapping of BucketModelConfig's arguments: {error}"
            ) from None
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


def _check_extra_file(name: str, source: str | os.PathLike[str] | bytes) -> None:
    """Check that ``source`` is a file, and ``name`` one inside the artifact that the artifact does not use itself."""
    if not isinstance(source, bytes) and not Path(source).is_file():
        raise TraceConfigError(f"extra_files: there is no file {source}")
    try:
        checked_name(name)
    except ArtifactError as error:
        raise TraceConfigError(f"extra_files: {error}") from None
    first = name.split("/")[0]
    if first in (MANIFEST_NAME, BUCKET_KERNEL_NAME) or (first != name and first in ("graphs", "ops", "weights")):
        raise TraceConfigError(f"extra_files: {name!r} is a name of the artifact's own; choose another")


def tracing_backend(name: str) -> Backend:
    """The backend, if models can be traced for it here. Raises TraceConfigError, BackendUnavailableError."""
    try:
        backend = registry.get(name)
    except ArtifactBackendError as error:
        raise TraceConfigError(str(error)) from None
    probe = backend.probe_compiler()
    if not probe.ok:
        raise BackendUnavailableError(f"the backend {name!r} cannot trace here: {probe.reason}")
    return backend


def require_stages(backend: Backend, stages: int) -> None:
    """Raise TraceConfigError if the backend has no pipeline stages and there are to be several."""
    if stages > 1 and backend.one_process:
        raise TraceConfigError(
            f"pp_degree={stages}: the {backend.name} backend runs all ranks in one process, without pipeline stages: "
            "trace with pp_degree=1 and a higher tp_degree, or for another backend"
        )


def options_of(
    backend: Backend, compiler_args: Any, target: str | None, quantize: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the backend's options, checked and completed, and the words of ``compiler_args`` that mean nothing to it.
    Raises TraceConfigError."""
    given, ignored = arguments_of(compiler_args, backend, target)
    check_quantize(backend, quantize)
    return backend.options(given, quantize), ignored


def make_workdir(options: TraceOptions | RecompileOptions) -> None:
    """Create the user's directory for compiler files. Raises TraceConfigError if that fails."""
    try:
        if options.compiler_workdir is not None:
            Path(options.compiler_workdir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceConfigError(
            f"compiler_workdir: the directory {options.compiler_workdir} cannot be made: {error.strerror}; choose "
            "another"
        ) from error
