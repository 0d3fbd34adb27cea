"""A stand-in for ``torch_neuronx`` if it is not installed: its names that PyTorch alone can give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from nxd_infer.compat.views import DeviceName
from nxd_infer.errors import InputMismatchError
from nxd_infer.trace import BucketModelConfig, bucket_model_trace
from nxd_infer.util.also_called import also_called

__all__ = ["BucketModelConfig", "DataParallel", "RmsNorm", "async_load", "bucket_model_trace", "dynamic_batch",
           "lazy_load", "move_trace_to_device", "neuron_layer", "nki_jit", "trace"]  # fmt: skip


@also_called(
    ignored="compiler_args compiler_workdir compiler_timeout inline_weights_to_neff options partitioner_config",
    neutral={"input_output_aliases": None, "states": None},
)
def trace(func: Callable[..., Any], example_inputs: Any) -> torch.jit.ScriptModule:
    """Return ``func`` traced by ``torch.jit.trace``, for ``torch.jit.save`` and ``torch.jit.load``.

    It runs on the CPU for one rank. :func:`nxd_infer.trace.parallel_model_trace` makes an artifact instead, for any
    backend, with buckets and states.
    """
    key = "example_kwarg_inputs" if isinstance(example_inputs, dict) else "example_inputs"
    with torch.no_grad():
        return torch.jit.trace(func, **{key: example_inputs}, check_trace=False, strict=False)  # pyright: ignore


class DataParallel(nn.Module):
    """Splits a batch along ``dim`` into a piece per device, runs ``model`` on each, and joins the outputs.

    Here the pieces run one after another on this machine. ``device_ids`` None is one device. With
    ``set_dynamic_batching`` pieces may be of different sizes; without it, a batch that does not divide is an error.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        device_ids: Sequence[int] | None = None,
        dim: int | bool = 0,
        set_dynamic_batching: bool = True,
    ):
        super().__init__()
        if isinstance(dim, bool):  # the third place, of scripts that leave `dim` out
            dim, set_dynamic_batching = 0, dim
        self.model, self.dim, self.dynamic_batching = model, dim, set_dynamic_batching
        self.device_ids = list(device_ids) if device_ids is not None else [0]
        self.num_workers = 2 * len(self.device_ids)

    def disable_dynamic_batching(self) -> None:
        self.dynamic_batching = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*inputs, *kwargs.values()) if isinstance(value, Tensor)]
        rows, parts = (tensors[0].shape[self.dim] if tensors else 1), len(self.device_ids)
        if not self.dynamic_batching and rows % parts:
            raise InputMismatchError(f"a batch of {rows} does not divide over {parts} devices: pad it")

        def piece(value: Any, place: int) -> Any:
            return value.tensor_split(parts, self.dim)[place] if isinstance(value, Tensor) else value

        outputs = [
            self.model(*(piece(value, i) for value in inputs), **{key: piece(v, i) for key, v in kwargs.items()})
            for i in range(min(parts, rows))
        ]
        return tree_map(lambda *pieces: torch.cat(pieces, self.dim), outputs[0], *outputs[1:])


def nki_jit(kernel: Any = None, **_: Any) -> Any:
    """Return a kernel that can be passed around; calling it raises DeviceOnlyError."""
    if kernel is None:
        return nki_jit
    if isinstance(kernel, DeviceName):
        return kernel
    name = getattr(kernel, "__qualname__", repr(kernel))
    return DeviceName(name, "write it in plain PyTorch, which a backend compiles")


def neuron_layer(function: Any, *_: Any, **__: Any) -> Any:
    """Return what is given: marks and placements of a Neuron device have no effect here."""
    return function


async_load = dynamic_batch = lazy_load = move_trace_to_device = neuron_layer
""":func:`trace` gives a module that is loaded, on this machine, and takes a batch of any size."""


class RmsNorm:
    """``RmsNorm.apply(hidden, weight, eps, dim)``: the root mean square norm over ``dim``, computed in float32."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, eps: float = 1e-6, dim: int = -1) -> Tensor:
        moved = hidden.movedim(dim, -1).float()
        return F.rms_norm(moved, weight.shape, weight.float(), float(eps)).movedim(-1, dim).to(hidden.dtype)
