"""A rank's weight file, which is memory-mapped; it also holds initial values of states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nxd_infer.artifact.manifest import TensorSpec, WeightSpec
from nxd_infer.errors import ArtifactCorruptError
from nxd_infer.layout.files.stream import write_safetensors

STATE_PREFIX = "state:"
"""Prefix in a rank's weight file for the initial value of a state that does not start as zeros."""


def load_weights(file: Path, specs: Sequence[WeightSpec], *, partial: bool = False) -> dict[str, Tensor]:
    """Return the weights of one rank, memory-mapped (copy on write): pages are read when a graph touches them.

    A weight whose traced stride is not contiguous is copied into that stride, because graphs are compiled for it.
    With ``partial`` some may be absent.
    """
    from safetensors import SafetensorError, safe_open

    weights: dict[str, Tensor] = {}
    try:
        with safe_open(file, framework="pt") as source:
            present = set(source.keys())
            for spec in specs:
                if partial and spec.name not in present:
                    continue
                tensor = source.get_tensor(spec.name)
                if tensor.dtype != spec.torch_dtype or list(tensor.shape) != spec.shape:
                    raise ArtifactCorruptError(
                        f"{file.name}: {spec.name!r} is {tensor.dtype}{list(tensor.shape)}, "
                        f"expected {spec.dtype}{spec.shape}"
                    )
                if list(tensor.stride()) != spec.stride and tensor.numel() > 0:
                    tensor = _empty(spec).copy_(tensor)
                weights[spec.name] = tensor
    except SafetensorError as error:
        raise ArtifactCorruptError(f"{file.name} cannot be read as safetensors: {error}") from error
    return weights


def load_entries(file: Path, specs: Sequence[WeightSpec]) -> dict[tuple[str, int], Tensor]:
    """Return the entries of adapter tables in a file of new weights, memory-mapped, by table and slot."""
    from safetensors import safe_open

    tables = {spec.name: spec for spec in specs}
    entries: dict[tuple[str, int], Tensor] = {}
    with safe_open(file, framework="pt") as source:
        for name in list(source.keys()):
            entry = parse_entry(name)
            if entry is None or entry[0] not in tables:
                continue
            spec, tensor = tables[entry[0]], source.get_tensor(name)
            if tensor.dtype != spec.torch_dtype or list(tensor.shape) != spec.shape[1:] or entry[1] >= spec.shape[0]:
                raise ArtifactCorruptError(
                    f"{file.name}: {name!r} is {tensor.dtype}{list(tensor.shape)}, expected {spec.dtype}"
                    f"{spec.shape[1:]} and a slot below {spec.shape[0]}"
                )
            entries[entry] = tensor
    return entries


def load_initial_states(file: Path, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Return the states that do not start as zeros, by name."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        present = set(source.keys())
        initial = {
            spec.name: source.get_tensor(STATE_PREFIX + spec.name)
            for spec in specs
            if STATE_PREFIX + spec.name in present
        }
    for spec in specs:
        tensor = initial.get(spec.name)
        if tensor is not None and (tensor.dtype != spec.torch_dtype or list(tensor.shape) != spec.shape):
            raise ArtifactCorruptError(
                f"{file.name}: the initial value of state {spec.name!r} is {tensor.dtype}{list(tensor.shape)}, "
                f"expected {spec.dtype}{spec.shape}"
            )
    return initial


def _empty(spec: TensorSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype)


_ENTRY = re.compile(r"(.+)\[(\d+)\]")


def entry_name(table: str, slot: int) -> str:
    """Return the name of the entry ``table[slot]`` of an adapter table in a rank's file of new weights."""
    return f"{table}[{slot}]"


def parse_entry(name: str) -> tuple[str, int] | None:
    """Invert :func:`entry_name`; None for the name of a full weight."""
    match = _ENTRY.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def file_entries(specs: Iterable[WeightSpec]) -> list[tuple[str, torch.dtype, list[int]]]:
    """Return the name, dtype and shape of each of ``specs``, for :func:`write_safetensors`."""
    return [(spec.name, spec.torch_dtype, spec.shape) for spec in specs]


def replace_weights(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a rank's weight file with ``tensors``, in place of those of the same names if there are such."""
    from safetensors import safe_open

    with safe_open(source, framework="pt") as file, open(target, "wb") as out:

        def tensor(name: str) -> Tensor:
            return tensors[name] if name in tensors else file.get_tensor(name)

        names = sorted({*file.keys(), *tensors})
        entries = [(name, one.dtype, one.shape) for name in names for one in [tensor(name)]]
        write_safetensors(out, entries, tensor)
