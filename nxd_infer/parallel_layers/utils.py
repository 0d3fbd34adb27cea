"""Small helpers for ported code: exact division, splitting, vocabulary ranges, parameter attributes."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nxd_infer.context import current_context
from nxd_infer.errors import ShardingError
from nxd_infer.layout.params import move_model_to_device  # noqa: F401  (ported code imports it from here)
from nxd_infer.util.devices import HOST

_TP_ATTRIBUTES = ("tensor_model_parallel", "partition_dim", "partition_stride", "num_partitions", "nxd_layout")


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise ShardingError unless ``numerator`` divides by ``denominator``."""
    if denominator < 1 or numerator % denominator:
        fits = [d for d in range(1, min(abs(numerator), 64) + 1) if numerator % d == 0]
        raise ShardingError(
            f"{numerator} is not divisible by {denominator}; it divides by {fits}"
            + ("" if abs(numerator) <= 64 else " and perhaps by larger degrees")
        )


def divide(numerator: int, denominator: int) -> int:
    """Return the exact ``numerator // denominator``. Raises ShardingError (a ValueError) on a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """Return how much has to be added to ``numerator`` so that ``denominator`` divides it."""
    return -numerator % denominator


def split_tensor_along_dim(
    tensor: Tensor, partition_dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return ``num_partitions`` equal views along ``partition_dim`` (copies with ``contiguous_split_chunks``)."""
    chunks = torch.split(tensor, divide(tensor.shape[partition_dim], num_partitions), partition_dim)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else tuple(chunks)


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return ``num_partitions`` equal views along the last dimension (copies with ``contiguous_split_chunks``)."""
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def indices_split_along_dim(tensor: Tensor, dim: int, rank: int | Tensor, num_partitions: int) -> Tensor:
    """Return the indices, int64, of the ``rank``-th of ``num_partitions`` equal pieces of a dimension."""
    size = divide(tensor.shape[dim], num_partitions)
    return torch.arange(size, device=tensor.device) + rank * size


class EmbeddingUtility:
    """The range of vocabulary ids that a rank holds: ``[first, last)``."""

    @staticmethod
    def range_from_per_partition_vocab_size(per_partition_vocab_size: int, rank: int) -> tuple[int, int]:
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        return EmbeddingUtility.range_from_per_partition_vocab_size(divide(global_vocab_size, world_size), rank)


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Mark a parameter as split along ``dim`` with the reference's attributes, which ported code reads.

    ``num_partitions`` None: the tensor-parallel degree, of a parameter that is parallel.
    """
    if num_partitions is None:
        num_partitions = current_context().tp.degree if is_parallel else 1
    attributes = {
        "tensor_model_parallel": is_parallel,
        "partition_dim": dim,
        "partition_stride": stride,
        "num_partitions": num_partitions,
    }
    for name, value in attributes.items():
        setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination: Tensor, source: Tensor) -> None:
    """Copy the parallel attributes and the layout of ``source`` to ``destination``."""
    for name in _TP_ATTRIBUTES:
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor) -> bool:
    """Return whether this rank counts ``param`` in a sum over the tensor-parallel ranks."""
    return bool(getattr(param, "tensor_model_parallel", False)) or current_context().tp.rank == 0


def get_local_world_size() -> int:
    """Return the number of ranks on this host: the launcher's ``LOCAL_WORLD_SIZE``, else all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or current_context().world_size)


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """Return ``data`` with every tensor in its lists, tuples and dictionaries on the host, unless ``convert=False``."""
    return tree_map(lambda value: value.to(HOST) if convert and isinstance(value, Tensor) else value, data)


def cast_if_autocast_enabled(*args: Any) -> tuple[Any, ...]:
    """Return the arguments, their floating-point tensors in autocast's dtype where that is enabled."""
    kind = next((value.device.type for value in args if isinstance(value, Tensor)), HOST.type)
    if not torch.is_autocast_enabled(kind):
        return args
    dtype = torch.get_autocast_dtype(kind)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, args)


def verify_casted_dtype(value: Tensor) -> None:
    """Raise ShardingError unless a tensor has autocast's dtype where that is enabled."""
    kind = value.device.type
    if torch.is_autocast_enabled(kind) and value.is_floating_point() and value.dtype != torch.get_autocast_dtype(kind):
        raise ShardingError(f"autocast computes in {torch.get_autocast_dtype(kind)}, and the tensor is {value.dtype}")
