"""BucketModelConfig: several shapes of one model in one traced model, and the rule that chooses one per call.

Source: the autobucketing guide of torch-neuronx (``BucketModelConfig``, ``bucket_model_trace``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxd_infer.errors import TraceConfigError


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
