"""The request of a trace: its options, checked against each other before anything runs, and what follows from them: the
buckets (:class:`BucketModelConfig`: several shapes of one model, and the rule that chooses one per call).

Source of BucketModelConfig: the autobucketing guide of torch-neuronx.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import BUCKET_KERNEL_NAME, MANIFEST_NAME
from nxd_infer.artifact.writer import ArtifactWriter, checked_name
from nxd_infer.backends import registry
from nxd_infer.backends.base import Backend, arguments_of, check_quantize
from nxd_infer.checkpoint.source import weight_source
from nxd_infer.errors import (
    ArtifactBackendError,
    ArtifactError,
    BackendUnavailableError,
    ParallelConfigError,
    TraceConfigError,
)
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
    _check_packed(options, backend)
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


def _check_packed(options: TraceOptions, backend: Backend) -> None:
    if options.packed and not backend.encodings:
        raise TraceConfigError(
            f"packed=True: the {backend.name} backend reads weights as files hold them anyway: leave it out"
        )
    if options.packed and options.serialization_path is not None:
        raise TraceConfigError(
            "serialization_path writes plain weights, and packed=True has none: leave one of the two out"
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


class BucketModelConfig:
    """How a bucket is chosen and what the buckets share.

    Args:
        bucket_kernel: a callable that returns a ``torch.jit.script`` function
            ``(List[Tensor]) -> Tuple[List[Tensor], Tensor]``: from a call's inputs to the chosen bucket's inputs and
            its number. It is run as it is. None (the default): the smallest bucket that fits, padding only what the
            model declares (``nxd_inputs``).
        shared_state_buffer: initial tensors of the states (in the order of the alias dictionary), shared by all
            buckets. Default: those of the module.
        shared_state_buffer_preprocessor: a callable that returns a ``torch.jit.script`` function
            ``(shapes: List[List[List[int]]], states: List[Tensor], bucket: Tensor) -> List[Tensor]``: the views of the
            shared buffers that a bucket's model works on; ``shapes[i][j]`` is the shape of state j in bucket i. It
            must return views (slices), because the model's updates go through them.
        func_kwargs: keyword arguments of ``func``: one dictionary for all buckets, or a list with one for each.
        bucket_kernel_constant_args: additional arguments of the bucket kernel, bound to it when it is saved.
        names: a name for each bucket (default ``bucket_0``, ...), for ``run_bucket`` and error texts.
        metadata: a dictionary for each bucket, stored in the artifact.
    """

    def __init__(
        self,
        bucket_kernel: Callable[..., Any] | None = None,
        *,
        shared_state_buffer: Sequence[Tensor] | None = None,
        shared_state_buffer_preprocessor: Callable[..., Any] | None = None,
        func_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        bucket_kernel_constant_args: Sequence[Any] | None = None,
        names: Sequence[str] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
    ):
        for name, value in (
            ("bucket_kernel", bucket_kernel),
            ("shared_state_buffer_preprocessor", shared_state_buffer_preprocessor),
        ):
            if value is not None and not callable(value):
                raise TraceConfigError(
                    f"{name} must be a callable that returns a torch.jit.script function, got {value!r}"
                )
        if shared_state_buffer_preprocessor is not None and shared_state_buffer is None:
            raise TraceConfigError("shared_state_buffer_preprocessor is given without shared_state_buffer")
        if shared_state_buffer is not None and not all(isinstance(t, Tensor) for t in shared_state_buffer):
            raise TraceConfigError("shared_state_buffer must be a list of tensors")
        self.bucket_kernel = bucket_kernel
        self.shared_state_buffer = list(shared_state_buffer) if shared_state_buffer is not None else None
        self.shared_state_buffer_preprocessor = shared_state_buffer_preprocessor
        self.func_kwargs = func_kwargs
        self.bucket_kernel_constant_args = list(bucket_kernel_constant_args or ())
        self.names = list(names) if names is not None else None
        self.metadata = [dict(entry) for entry in metadata] if metadata is not None else None
        self.example_inputs: list[Any] = []

    @property
    def bucket_degree(self) -> int:
        """The number of buckets; 0 before the example inputs are known."""
        return len(self.example_inputs)

    def store_example_inputs(self, example_inputs: Sequence[Any]) -> None:
        """Set the example inputs, one entry per bucket. Raises TraceConfigError if a list here has another length."""
        if isinstance(example_inputs, (Tensor, Mapping)) or not len(example_inputs):
            raise TraceConfigError(
                "with a bucket_config, example_inputs is a list with one entry (a tensor, a tuple of tensors or a "
                f"dictionary) a bucket, got {type(example_inputs).__name__}"
            )
        count = len(example_inputs)
        for name in ("func_kwargs", "names", "metadata"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping) and len(value) != count:
                raise TraceConfigError(f"{name} has {len(value)} entries for {count} buckets")
        if self.names is not None and len(set(self.names)) != count:
            raise TraceConfigError(f"bucket names must differ, got {self.names}")
        self.example_inputs = list(example_inputs)

    def get_func_kwargs_for_bucket_rank(self, bucket_rank: int) -> dict[str, Any]:
        """Return the keyword arguments of ``func`` for one bucket."""
        if self.func_kwargs is None:
            return {}
        if isinstance(self.func_kwargs, Mapping):
            return dict(self.func_kwargs)
        return dict(self.func_kwargs[bucket_rank])

    def bucket_names(self) -> list[str]:
        return self.names or [f"bucket_{i}" for i in range(self.bucket_degree)]


@dataclass(frozen=True)
class Bucket:
    """One shape to trace."""

    index: int
    name: str
    example: Any
    func_kwargs: dict[str, Any]
    metadata: dict[str, Any]


def list_buckets(
    example_inputs: Any, config: BucketModelConfig | None, func_kwargs: Mapping[str, Any] | None
) -> list[Bucket]:
    """Return the buckets to trace: one without a configuration, else one per entry of ``example_inputs``."""
    if config is None:
        return [Bucket(0, "bucket_0", example_inputs, dict(func_kwargs or {}), {})]
    config.store_example_inputs(example_inputs)
    return [
        Bucket(
            index,
            name,
            config.example_inputs[index],
            {**(func_kwargs or {}), **config.get_func_kwargs_for_bucket_rank(index)},
            config.metadata[index] if config.metadata is not None else {},
        )
        for index, name in enumerate(config.bucket_names())
    ]


class _Bound(torch.nn.Module):
    """Holds a bucket kernel and the constant tensors that it is called with."""

    def __init__(self, kernel: Any, constants: Sequence[Tensor]):
        super().__init__()
        self.kernel = kernel
        for i, value in enumerate(constants):
            self.register_buffer(f"constant_{i}", value)


def scripted(factory: Callable[..., Any], what: str) -> Any:
    """Return the result of ``factory``. Raises TraceConfigError if it is not TorchScript."""
    try:
        function = factory()
    except Exception as error:
        raise TraceConfigError(f"{what} raised {type(error).__name__}: {error}") from error
    if not isinstance(function, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
        raise TraceConfigError(
            f"{what} must return a torch.jit.script function, so that it can be saved with the model; "
            f"it returned {type(function).__name__}: return torch.jit.script(kernel)"
        )
    return function


def save_kernel(config: BucketModelConfig, path: Any) -> None:
    """Write the user's bucket kernel as TorchScript: ``forward(inputs: List[Tensor])``."""
    if config.bucket_kernel is None:
        return
    kernel = scripted(config.bucket_kernel, "bucket_kernel")
    if config.bucket_kernel_constant_args:
        kernel = _bind(kernel, config.bucket_kernel_constant_args)
    # Write from memory, because torch.jit.save to a path aborts the process if the disk is full.
    Path(path).write_bytes(kernel.save_to_buffer())


def _bind(kernel: Any, constants: list[Any]) -> Any:
    if not all(isinstance(value, Tensor) for value in constants):
        raise TraceConfigError("bucket_kernel_constant_args must be tensors")
    module = torch.jit.script(_Bound(kernel, constants))
    arguments = ", ".join(f"self.constant_{i}" for i in range(len(constants)))
    module.define(f"def forward(self, inputs: List[Tensor]):\n    return self.kernel(inputs, {arguments})\n")
    return module


def wants_bucket_rank(func: Callable[..., Any]) -> bool:
    """Whether ``func`` has a parameter ``bucket_rank``, which then receives the index of the bucket to build."""
    try:
        return "bucket_rank" in inspect.signature(func).parameters
    except (TypeError, ValueError):
        return False
